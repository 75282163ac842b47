"""Objects among several ranks at once: every call, on the world, on a subgroup and among named ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.ranks import run_ranks
from tests.same import assert_arrived
from tests.values import VALUES


def objects() -> list[Any]:
    """One for each of up to seven ranks, of very different sizes."""
    torch.manual_seed(5)
    return [
        None,
        {"big": torch.randn(300_000), "small": torch.randn(3), "n": None},
        [],
        [torch.randn(16) for _ in range(300)],
        {"many": [torch.randn(128, 128) for _ in range(9)], "text": "x" * 70_000},
        torch.arange(3 << 20, dtype=torch.float32),  # several chunks
        ({1: (2, "3")}, {4.5}),
    ]


def check_all_calls(members: list[int], **where: Any) -> None:
    """Every call among ``members``, which are all those that make it."""
    me, count = dist.get_rank(), len(members)
    values = objects()[:count]
    of = dict(zip(members, values, strict=True))
    for src in members:
        arrived = objcomm.broadcast_object(of[src] if me == src else (), src, **where)
        if me == src:
            assert arrived is of[src]
        else:
            assert_arrived(arrived, of[src])

        arrived = objcomm.scatter_objects(values if me == src else None, src, **where)
        if me == src:
            assert arrived is of[me]
        else:
            assert_arrived(arrived, of[me])

        gathered = objcomm.gather_objects(of[me], src, **where)
        if me == src:
            assert gathered is not None
            check_list(gathered, of, me)
        else:
            assert gathered is None
    check_list(objcomm.all_gather_objects(of[me], **where), of, me)
    # What this rank has for the rank at place i is the object of the place this one's and i add up to.
    place = members.index(me)
    mine = [values[(place + i) % count] for i in range(count)]
    check_list(objcomm.all_to_all_objects(mine, **where), dict(zip(members, mine, strict=True)), me)


def check_list(arrived: list[Any], of: dict[int, Any], me: int) -> None:
    assert len(arrived) == len(of)
    for got, (rank, value) in zip(arrived, of.items(), strict=True):
        if rank == me:
            assert got is value
        else:
            assert_arrived(got, value)


@pytest.mark.parametrize("world", [2, 4, 7])
def test_every_call_on_the_world(world: int, backend: str) -> None:
    run_ranks(lambda rank: check_all_calls(list(range(world))), world, backend=backend, timeout=120)


def test_every_call_on_a_subgroup_without_rank_0(backend: str) -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([1, 2, 4])
        if rank in (1, 2, 4):
            check_all_calls([1, 2, 4], group=group)
            assert objcomm.broadcast_object(rank, group=group, group_src=2) == 4
            assert objcomm.scatter_objects("abc" if rank == 1 else None, group=group, group_src=0) == {
                1: "a",
                2: "b",
                4: "c",
            }.get(rank)
            assert objcomm.gather_objects(rank, group=group, group_dst=1) == ([1, 2, 4] if rank == 2 else None)

    run_ranks(ranks, 5, backend=backend)


def test_every_call_among_named_ranks(backend: str) -> None:
    def ranks(rank: int) -> None:
        named = [5, 0, 3]  # lists are in this order
        if rank in named:
            check_all_calls(named, ranks=named)
        else:
            check_all_calls([1, 2, 4], ranks=[1, 2, 4])

    run_ranks(ranks, 6, backend=backend)


def test_a_call_of_one_rank_alone() -> None:
    def ranks(rank: int) -> None:
        for async_op in (False, True):

            def over(result: Any, waits: bool = async_op) -> Any:
                return result.wait() if waits else result

            obj = object()
            assert over(objcomm.broadcast_object(obj, rank, ranks=[rank], async_op=async_op)) is obj
            assert over(objcomm.scatter_objects([obj], rank, ranks=[rank], async_op=async_op)) is obj
            assert over(objcomm.all_gather_objects(obj, ranks=[rank], async_op=async_op)) == [obj]
            assert over(objcomm.all_to_all_objects([obj], ranks=[rank], async_op=async_op)) == [obj]
        assert objcomm.gather_objects(obj, rank, ranks=[rank]) == [obj]

    run_ranks(ranks, 2)


def test_broadcast_of_every_value(backend: str) -> None:
    def ranks(rank: int) -> None:
        for i, (name, make) in enumerate(VALUES):
            torch.manual_seed(11)
            src = i % 3
            value = make()
            got = objcomm.broadcast_object(value if rank == src else (), src, channel=name)
            if rank == src:
                assert got is value
            else:
                assert_arrived(got, value)

    run_ranks(ranks, 3, backend=backend, timeout=120)


def test_all_gather_of_every_value() -> None:
    def ranks(rank: int) -> None:
        for name, make in VALUES:
            torch.manual_seed(11)
            value = make()
            for other, got in enumerate(objcomm.all_gather_objects(value, channel=name)):
                if other != rank:
                    assert_arrived(got, value)

    run_ranks(ranks, 3, timeout=120)


def test_handles(backend: str) -> None:
    def ranks(rank: int) -> None:
        values = objects()[:4]
        handles: list[Any] = []
        for src in range(4):
            handles.append(objcomm.broadcast_object(values[src] if rank == src else None, src, async_op=True))
            handles.append(objcomm.scatter_objects(values if rank == src else None, src, async_op=True))
        handles.append(objcomm.all_gather_objects(values[rank], async_op=True))
        handles.append(objcomm.all_to_all_objects(values, async_op=True))
        assert "among several ranks" in repr(handles[-1])
        arrived = [handle.wait() for handle in reversed(handles)][::-1]
        assert repr(handles[-1]) == "<ObjectWork: over>"
        for src in range(4):
            if rank != src:
                assert_arrived(arrived[2 * src], values[src])
                assert_arrived(arrived[2 * src + 1], values[rank])
        check_list(arrived[-2], dict(enumerate(values)), rank)
        check_list(arrived[-1], dict.fromkeys(range(4), values[rank]), rank)
        assert handles[0].wait() is arrived[0]

        # Handles that are dropped: everything arrives all the same, and the next call is in step.
        for _ in range(3):
            objcomm.broadcast_object(values[1], 1, async_op=True)
        gc.collect()
        assert objcomm.all_gather_objects(rank) == [0, 1, 2, 3]

    run_ranks(ranks, 4, backend=backend)


def test_receives_that_were_posted_ahead_come_first(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 1:
            work = objcomm.irecv_object(0)
        if rank == 0:
            sent = objcomm.isend_object("p2p", 1)
        assert objcomm.all_gather_objects(rank) == [0, 1, 2]
        assert objcomm.broadcast_object(rank, 2) == 2
        if rank == 1:
            assert work.wait() == "p2p"
        if rank == 0:
            sent.wait()

    run_ranks(ranks, 3, backend=backend)


def test_wrong_arguments() -> None:
    def ranks(rank: int) -> None:
        for call, words in [
            (lambda: objcomm.broadcast_object(1), "exactly one of src and group_src"),
            (lambda: objcomm.broadcast_object(1, 0, group_src=0), "exactly one of src and group_src"),
            (lambda: objcomm.gather_objects(1), "exactly one of dst and group_dst"),
            (lambda: objcomm.broadcast_object(1, 5), "src, 5, is not among the ranks"),
            (lambda: objcomm.broadcast_object(1, 0, ranks=[rank]) if rank else None, "src, 0, is not among the ranks"),
            (lambda: objcomm.gather_objects(1, group_dst=7), "group_dst=7 is no rank"),
            (lambda: objcomm.all_gather_objects(1, ranks=[1 - rank]), f"this rank, {rank}, is not among the ranks"),
            (lambda: objcomm.all_gather_objects(1, ranks=[0, 1, 1]), "more than once"),
            (lambda: objcomm.all_gather_objects(1, ranks=[0, 1.0]), "ranks must be ints"),  # type: ignore[list-item]
            (lambda: objcomm.all_gather_objects(1, ranks=[0, 1, 9]), "9"),
            (lambda: objcomm.all_gather_objects(1, timeout="soon"), "timeout"),  # type: ignore[call-overload]
            (lambda: objcomm.all_gather_objects(1, device="nowhere"), "device"),
            (lambda: objcomm.all_gather_objects(1, channel=3), "channel"),  # type: ignore[call-overload]
        ]:
            if rank == 0 and "src, 0, is not" in words:
                continue
            with pytest.raises(objcomm.UsageError, match=words):
                call()
        # A wrong list is told to those that wait for what is in it.
        with pytest.raises(objcomm.UsageError if rank == 0 else objcomm.PeerError, match="2 objects is needed"):
            objcomm.scatter_objects([1, 2, 3], 0)
        with pytest.raises(objcomm.UsageError if rank == 1 else objcomm.PeerError, match="2 objects is needed"):
            objcomm.all_to_all_objects([1, 2] if rank == 0 else {1, 2})  # type: ignore[arg-type]
        assert objcomm.all_gather_objects(rank) == [0, 1]

    run_ranks(ranks, 2)


def test_a_tensor_that_requires_grad_is_refused_where_its_gradient_would_be_lost() -> None:
    def ranks(rank: int) -> None:
        obj = [torch.ones(2, requires_grad=True)] if rank == 0 else None
        for async_op in (False, True):
            with pytest.raises(objcomm.EncodeError if rank == 0 else objcomm.PeerError, match="grad"):
                work: Any = objcomm.broadcast_object(obj, 0, forbid_grad=True, async_op=async_op)
                work.wait()
        with torch.no_grad():
            assert objcomm.broadcast_object(obj, 0, forbid_grad=True) is not None

    run_ranks(ranks, 3)
