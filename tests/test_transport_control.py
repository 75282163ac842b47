"""The control side beside a group without gloo."""

from __future__ import annotations

import time

import torch.distributed as dist

from objcomm.deadline import Deadline
from objcomm.errors import TransferTimeout, UsageError
from objcomm.transport import init_control
from tests.links import error_of, filled, link_to
from tests.ranks import run_ranks


def test_heads_become_elastic_and_segments_stay_on_the_backend() -> None:
    def rank_main(rank: int) -> None:
        init_control()
        init_control()
        there = link_to((rank + 1) % 3)
        before = link_to((rank - 1) % 3)
        assert (there.exact, there.window, there.can_say_goodbye) == (False, 64 << 10, True)
        window, memory = filled(there.window, 0), filled(5000, 0)
        received = before.recv_head(window)
        sent = [there.send_head(filled(3, rank)), there.send_segments([filled(5000, rank)])]
        received.wait(Deadline(20))
        before.recv_segments([memory], [False]).wait(Deadline(20))
        for pending in sent:
            pending.wait(Deadline(20))
        assert window[:4].tolist() == [before.peer] * 3 + [0]
        assert (memory == before.peer).all()

    run_ranks(rank_main, 3, backend="strict")


def test_a_subgroup_gets_one_of_its_own() -> None:
    def rank_main(rank: int) -> None:
        group = dist.new_group([1, 2], use_local_synchronization=True)
        if rank == 0:
            return
        init_control(group)
        assert not link_to(3 - rank, group).exact
        assert link_to(3 - rank).exact

    run_ranks(rank_main, 3, backend="strict")


def test_nothing_happens_where_there_is_gloo() -> None:
    def rank_main(rank: int) -> None:
        if rank == 0:
            init_control()  # alone, and it returns
        assert not link_to(1 - rank).exact

    run_ranks(rank_main)


def test_a_rank_that_does_not_call_is_named() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            time.sleep(1.5)
            return
        began = time.monotonic()
        error = error_of(init_control)
        assert isinstance(error, TransferTimeout)
        assert "not called by rank 1 within 1 s" in str(error)
        assert time.monotonic() - began < 5

    run_ranks(rank_main, 3, backend="strict", group_timeout=1.0)


def test_too_late_on_one_rank_is_an_error_on_all() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            link_to(0)
        error = error_of(init_control)
        assert isinstance(error, UsageError)
        assert "rank 1 has used objcomm on this group before" in str(error)
        dist.barrier()

    run_ranks(rank_main, 3, backend="strict")
