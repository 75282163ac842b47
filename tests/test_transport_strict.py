"""The strict backend itself: a checker that lets faults pass is worse than none."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

SECOND = timedelta(seconds=1)
PATIENCE = timedelta(seconds=20)


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_what_a_program_needs_to_start() -> None:
    def rank_main(rank: int) -> None:
        assert dist.get_backend() == "strict"
        dist.barrier()
        summed = torch.ones(3) * rank
        dist.all_reduce(summed)
        assert summed.tolist() == [3.0] * 3
        largest = torch.tensor(rank)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert largest == 2
        told = torch.full((2,), rank)
        dist.broadcast(told, 1)
        assert told.tolist() == [1, 1]
        parts = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        assert [part[0].item() for part in parts] == [0, 1, 2]
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": n} for n in range(3)]
        group = dist.new_group([2, 0], backend="strict", use_local_synchronization=True)
        if rank == 0:
            dist.send(torch.arange(4), 2, group=group)
        if rank == 2:
            got = torch.zeros(4, dtype=torch.int64)
            dist.recv(got, 0, group=group)
            assert got.tolist() == [0, 1, 2, 3]
        dist.barrier()

    run_ranks(rank_main, 3, backend="strict")


def test_both_send_first_on_one_communicator_never_ends() -> None:
    def rank_main(rank: int) -> None:
        sent = dist.isend(filled(1 << 20, rank), 1 - rank)
        received = dist.irecv(filled(1 << 20, 9), 1 - rank)
        for work in (sent, received):
            with pytest.raises(RuntimeError, match=r"timed out after 1 s: rank . has yet to"):
                work.wait(SECOND)

    run_ranks(rank_main, backend="strict")


def test_a_small_send_waits_for_its_receive() -> None:
    def rank_main(rank: int) -> None:
        if rank == 0:
            work = dist.isend(filled(1, 5), 1)
            with pytest.raises(RuntimeError, match="timed out"):
                work.wait(timedelta(seconds=0.3))
            dist.barrier()
            work.wait(PATIENCE)  # a time-out harms nothing
        else:
            dist.barrier()
            got = filled(1, 0)
            dist.recv(got, 0)
            assert got[0] == 5

    run_ranks(rank_main, backend="strict")


def test_order_is_that_of_posting() -> None:
    """Rank 1 takes what came second first, so neither is ever taken."""

    def rank_main(rank: int) -> None:
        if rank == 0:
            works = [dist.isend(filled(8, 1), 1), dist.isend(filled(16, 2), 1)]
        else:
            works = [dist.irecv(filled(16, 0), 0), dist.irecv(filled(8, 0), 0)]
        for work in works:
            with pytest.raises(RuntimeError, match="rank 0 sends 8 bytes, rank 1 receives 16 bytes"):
                work.wait(PATIENCE)

    run_ranks(rank_main, backend="strict")


@pytest.mark.parametrize(("sent", "received"), [(10, 20), (20, 10), (0, 1)])
def test_sizes_must_be_equal(sent: int, received: int) -> None:
    def rank_main(rank: int) -> None:
        work = dist.isend(filled(sent, 1), 1) if rank == 0 else dist.irecv(filled(received, 0), 0)
        text = f"sizes differ: rank 0 sends {sent} bytes, rank 1 receives {received} bytes"
        with pytest.raises(RuntimeError, match=text):
            work.wait(PATIENCE)
        after = dist.isend(filled(1, 1), 1) if rank == 0 else dist.irecv(filled(1, 0), 0)
        with pytest.raises(RuntimeError, match=text):
            after.wait(PATIENCE)

    run_ranks(rank_main, backend="strict")


def test_there_are_no_tags() -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match="there are no tags, and the tag is 3"):
            dist.isend(filled(1, 1), 1 - rank, tag=3)

    run_ranks(rank_main, backend="strict")


def test_a_batch_is_a_unit() -> None:
    def rank_main(rank: int) -> None:
        group: Any = dist.group.WORLD
        got = [filled(1 << 20, 9) for _ in range(2)]
        group._start_coalescing(torch.device("cpu"))
        for n in range(2):
            group.send([filled(1 << 20, 10 * rank + n)], 1 - rank, 0)
            group.recv([got[n]], 1 - rank, 0)
        group._end_coalescing(torch.device("cpu")).wait(PATIENCE)
        assert [int(t[-1]) for t in got] == [10 * (1 - rank), 10 * (1 - rank) + 1]
        # One by one on the other end will do as well.
        if rank == 0:
            group._start_coalescing(torch.device("cpu"))
            for n in range(3):
                group.send([filled(100, n)], 1, 0)
            group._end_coalescing(torch.device("cpu")).wait(PATIENCE)
        else:
            for n in range(3):
                one = filled(100, 9)
                dist.recv(one, 0)
                assert one[0] == n

    run_ranks(rank_main, backend="strict")


def test_all_dtypes_and_no_gaps() -> None:
    def rank_main(rank: int) -> None:
        data = torch.arange(6).to(torch.bfloat16)
        if rank == 0:
            dist.send(data, 1)
            with pytest.raises(ValueError, match="contiguous"):
                dist.isend(torch.zeros(4, 4)[:, 0], 1)
        else:
            got = torch.zeros(6, dtype=torch.bfloat16)
            dist.recv(got, 0)
            assert torch.equal(got, data)

    run_ranks(rank_main, backend="strict")


def test_death_of_the_peer() -> None:
    def rank_main(rank: int) -> None:
        got = filled(4, 0)
        if rank == 1:
            dist.send(filled(4, 3), 0)
            os._exit(1)
        dist.recv(got, 1)
        assert got[0] == 3
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="the connection to rank 1 is closed"):
            dist.irecv(got, 1).wait(PATIENCE)
        assert time.monotonic() - began < 5

    run_ranks(rank_main, backend="strict", may_die=[1])
