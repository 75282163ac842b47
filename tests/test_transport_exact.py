"""The link over a backend without tags that demands equal sizes and keeps the order, as NCCL does."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from objcomm.deadline import Deadline
from objcomm.errors import PeerError, TransferTimeout, UsageError
from objcomm.transport import Link
from tests.links import error_of, filled, link_to
from tests.ranks import run_ranks


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("strict", "objcomm"))]


def test_both_may_send_first() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        assert (there.window, there.exact, there.can_say_goodbye) == (4 << 10, True, False)
        assert there.timeout == 30.0
        mine = [filled(1 << 20, rank + n) for n in range(3)]
        for _ in range(3):
            sent = [there.send_head(filled(4096, rank)), there.send_head(filled(100_000, rank))]
            sent.append(there.send_segments([*mine, filled(0, 0)]))
            head, rest = filled(4096, 9), filled(100_000, 9)
            there.recv_head(head).wait(Deadline(20))
            there.recv_head(rest).wait(Deadline(20))
            theirs = [there.allocate(n, False, None) for n in (1 << 20, 1 << 20, 1 << 20, 0)]
            received = there.recv_segments(theirs, [False] * 4)
            received.wait(Deadline(20))
            received.wait(Deadline(20))
            for pending in sent:
                pending.wait(Deadline(20))
            assert (head == 1 - rank).all()
            assert (rest == 1 - rank).all()
            assert [int(t[-1]) for t in theirs[:3]] == [1 - rank, 2 - rank, 3 - rank]

    run_ranks(rank_main, backend="strict")


def test_a_batch_may_be_taken_one_by_one() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        if rank == 0:
            there.send_segments([filled(1000, n) for n in range(3)]).wait(Deadline(20))
        else:
            for n in range(3):
                one = filled(1000, 9)
                there.recv_segments([one], [False]).wait(Deadline(20))
                assert (one == n).all()

    run_ranks(rank_main, backend="strict")


@pytest.mark.parametrize("step", [1, 2])
def test_rings_of_ranks_that_all_send_first(step: int) -> None:
    """Opening a connection takes both ends, but no rank waits in a call that only posts."""

    def rank_main(rank: int) -> None:
        after, before = link_to((rank + step) % 5), link_to((rank - step) % 5)
        began = time.monotonic()
        sent = after.send_head(filled(4096, rank))
        assert time.monotonic() - began < 5
        head = filled(4096, 9)
        before.recv_head(head).wait(Deadline(20))
        sent.wait(Deadline(20))
        assert head[0] == (rank - step) % 5

    run_ranks(rank_main, 5, backend="strict")


def test_messages_of_the_program_do_not_mix_with_those_of_a_link() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        head = filled(4096, 9)
        if rank == 0:
            ours = there.send_head(filled(4096, 1))
            dist.send(torch.ones(7), 1)
            ours.wait(Deadline(20))
        else:
            received = there.recv_head(head)
            plain = torch.zeros(7)
            dist.recv(plain, 0)
            received.wait(Deadline(20))
            assert (plain == 1).all()
            assert (head == 1).all()

    run_ranks(rank_main, backend="strict")


def test_links_leave_the_numbering_of_groups_alone() -> None:
    """Two ranks that have talked to different numbers of peers can still make a group by themselves."""

    def rank_main(rank: int) -> None:
        if rank < 3:
            for other in {0: [1, 2], 1: [0], 2: [0]}[rank]:
                there = link_to(other)
                received = there.recv_head(filled(4096, 9))
                there.send_head(filled(4096, rank)).wait(Deadline(20))
                received.wait(Deadline(20))
        if rank in (0, 1):
            group = dist.new_group([0, 1], use_local_synchronization=True)
            within = link_to(1 - rank, group)
            head = filled(4096, 9)
            received = within.recv_head(head)
            within.send_head(filled(4096, rank)).wait(Deadline(20))
            received.wait(Deadline(20))
            assert head[0] == 1 - rank

    run_ranks(rank_main, 3, backend="strict")


def test_a_subgroup_whose_ranks_differ_from_the_global_ones() -> None:
    def rank_main(rank: int) -> None:
        if rank == 0:
            return
        group = dist.new_group([1, 2, 3], use_local_synchronization=True)
        if rank == 1:
            return
        there = link_to(5 - rank, group)
        assert (there.rank, there.peer) == (rank, 5 - rank)
        sent = there.send_head(filled(4096, rank))
        head = filled(4096, 9)
        there.recv_head(head).wait(Deadline(20))
        sent.wait(Deadline(20))
        assert head[0] == 5 - rank

    run_ranks(rank_main, 4, backend="strict")


def test_a_peer_that_never_comes() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            dist.barrier()
            return
        there = link_to(1)
        sent = there.send_head(filled(4096, 0))
        received = there.recv_head(filled(4096, 0))
        began = time.monotonic()
        error = error_of(lambda: sent.wait(Deadline(0.3)))
        assert isinstance(error, TransferTimeout)
        assert "rank 1 has not made contact within 0.3 s" in str(error)
        # The reason stays, and nothing waits any more.
        assert isinstance(error_of(lambda: received.wait(Deadline(20))), TransferTimeout)
        closed = error_of(lambda: there.send_segments([filled(1, 1)]))
        assert isinstance(closed, PeerError)
        assert "closed since: rank 1 has not made contact" in str(closed)
        assert time.monotonic() - began < 3
        dist.barrier()

    run_ranks(rank_main, backend="strict")


def test_opening_ends_with_the_time_out_of_the_group_if_nobody_waits_longer() -> None:
    def rank_main(rank: int) -> None:
        if rank == 2:
            time.sleep(2.0)
            link_to(0).recv_head(filled(4096, 0)).wait(Deadline(20))
        elif rank == 0:
            forgotten, patient = link_to(1).send_head(filled(4096, 0)), link_to(2).send_head(filled(4096, 0))
            patient.wait(Deadline(20))
            error = error_of(lambda: forgotten.wait(Deadline(20)))
            assert isinstance(error, TransferTimeout)
            assert "rank 1 has not made contact within 1 s" in str(error)
            assert not any(name.startswith("objcomm-open") for name in threads())

    run_ranks(rank_main, 3, backend="strict", group_timeout=1.0)


def test_time_out_of_an_open_link_ends_it_on_both_ends() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        received = there.recv_head(filled(4096, 0))
        there.send_head(filled(4096, 0)).wait(Deadline(20))
        received.wait(Deadline(20))
        waiting = there.recv_head(filled(4096, 0))
        began = time.monotonic()
        if rank == 0:
            error = error_of(lambda: waiting.wait(Deadline(0.3)))
            assert isinstance(error, TransferTimeout)
            assert error_of(lambda: waiting.wait(Deadline(5))) is error
            assert "closed since: rank 1 did not come within 0.3 s" in str(
                error_of(lambda: there.recv_head(filled(1, 0)))
            )
        else:
            assert isinstance(error_of(lambda: waiting.wait(Deadline(30))), PeerError)
            assert isinstance(error_of(lambda: there.send_head(filled(1, 0))), PeerError)
        assert time.monotonic() - began < 5
        dist.barrier()  # the group itself is as usable as before

    run_ranks(rank_main, backend="strict")


def test_sizes_that_differ_are_an_error_on_both_ends() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        sent, received = filled(100, 0), filled(200, 0)
        pending = there.send_segments([sent]) if rank == 0 else there.recv_segments([received], [False])
        error = error_of(lambda: pending.wait(Deadline(20)))
        assert isinstance(error, PeerError)
        assert "100 bytes" in str(error)
        assert "200 bytes" in str(error)

    run_ranks(rank_main, backend="strict")


def test_death_of_the_peer_is_noticed_at_once() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        received = there.recv_head(filled(4096, 0))
        there.send_head(filled(4096, 0)).wait(Deadline(20))
        received.wait(Deadline(20))
        if rank == 1:
            os._exit(1)
        began = time.monotonic()
        error = error_of(lambda: there.recv_head(filled(4096, 0)).wait(Deadline(30)))
        assert isinstance(error, PeerError)
        assert "the connection to rank 1 is closed" in str(error)
        assert time.monotonic() - began < 5

    run_ranks(rank_main, backend="strict", may_die=[1])


def test_close_is_noticed_on_both_ends() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        received = there.recv_head(filled(4096, 0))
        there.send_head(filled(4096, 0)).wait(Deadline(20))
        received.wait(Deadline(20))
        waiting = there.recv_head(filled(4096, 0))
        if rank == 0:
            there.close()
            there.close()
            assert "broke off" in str(error_of(lambda: there.send_head(filled(4096, 0))))
        assert isinstance(error_of(lambda: waiting.wait(Deadline(20))), PeerError)

    run_ranks(rank_main, backend="strict")


def test_close_before_it_is_open() -> None:
    def rank_main(rank: int) -> None:
        if rank == 0:
            there = link_to(1)
            waiting = there.recv_head(filled(4096, 0))
            there.close()
            assert "broke off" in str(error_of(lambda: waiting.wait(Deadline(20))))
            end = time.monotonic() + 5
            while threads() and any("open" in name for name in threads()):
                assert time.monotonic() < end
                time.sleep(0.01)

    run_ranks(rank_main, backend="strict")


def test_a_group_that_is_destroyed_and_made_again() -> None:
    def rank_main(rank: int) -> None:
        import tests.strict_backend  # noqa: F401

        seen: list[weakref.ref[Link]] = []
        for attempt in range(3):
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False)
            prefixed = dist.PrefixStore(f"attempt{attempt}", store)
            limit = timedelta(seconds=20)
            dist.init_process_group("strict", store=prefixed, rank=rank, world_size=2, timeout=limit)
            there = link_to(1 - rank)
            assert there.alive
            head = filled(4096, 9)
            received = there.recv_head(head)
            there.send_head(filled(4096, attempt)).wait(Deadline(20))
            received.wait(Deadline(20))
            assert head[0] == attempt
            dist.barrier()
            dist.destroy_process_group()
            assert not there.alive
            seen.append(weakref.ref(there))
            del there, received
        end = time.monotonic() + 5
        while threads() or any(one() for one in seen):
            assert time.monotonic() < end, (threads(), [one() for one in seen])
            time.sleep(0.01)
            gc.collect()

    run_ranks(rank_main, backend=None)


def test_a_backend_with_the_extended_interface() -> None:
    def rank_main(rank: int) -> None:
        from tests.strict_backend import StrictGroup

        seen = []

        def create(description: Any, options: Any) -> StrictGroup:
            seen.append((description.group_rank, description.group_size, description.global_ranks_in_group))
            return StrictGroup(description.store, description.group_rank, description.group_size, description.timeout)

        dist.Backend.register_backend("extended", create, extended_api=True, devices=["cpu"])
        group = dist.new_group([1, 2], backend="extended", use_local_synchronization=True)
        if rank == 0:
            return
        there = link_to(3 - rank, group)
        sent = there.send_head(filled(4096, rank))
        head = filled(4096, 9)
        there.recv_head(head).wait(Deadline(20))
        sent.wait(Deadline(20))
        assert head[0] == 3 - rank
        assert seen[1:] == [(rank - 1, 2, [1, 2])] * 2

    run_ranks(rank_main, 3)


def test_a_backend_that_cannot_be_opened() -> None:
    def rank_main(rank: int) -> None:
        from torch.distributed import distributed_c10d as c10d

        group = dist.group.WORLD
        assert group is not None
        c10d._world.pg_backend_config[group] = "cpu:mpi"
        there = link_to(1 - rank)
        error = error_of(lambda: there.send_head(filled(4096, 1)))
        assert isinstance(error, UsageError)
        assert "init_control" in str(error)

    run_ranks(rank_main, backend="strict")


def test_many_threads_on_one_link() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        # Order among threads is nobody's promise, so all that they send is alike.
        works: list[threading.Thread] = []

        def go() -> None:
            for _ in range(10):
                there.send_segments([filled(1000, rank)]).wait(Deadline(20))

        def take() -> None:
            for _ in range(10):
                one = filled(1000, 9)
                there.recv_segments([one], [False]).wait(Deadline(20))
                assert (one == 1 - rank).all()

        works = [threading.Thread(target=target) for target in (go, take, go, take)]
        for thread in works:
            thread.start()
        for thread in works:
            thread.join(20)
            assert not thread.is_alive()

    run_ranks(rank_main, backend="strict")
