"""What fails on one rank of a call among several fails on all of them, in bounded time, and says where."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import objcomm
from tests.ranks import run_ranks
from tests.same import assert_arrived

BACKENDS = ["gloo", "strict"]

CALLS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda obj, **more: objcomm.broadcast_object(obj, 1, **more),
    "scatter": lambda obj, **more: objcomm.scatter_objects(each(obj, more.get("ranks")), 1, **more),
    "gather": lambda obj, **more: objcomm.gather_objects(obj, 1, **more),
    "all_gather": lambda obj, **more: objcomm.all_gather_objects(obj, **more),
    "all_to_all": lambda obj, **more: objcomm.all_to_all_objects(each(obj, more.get("ranks")), **more),
}
# The rank whose object matters, of ranks 0 to 3.
SENDERS = {"broadcast": 1, "scatter": 1, "gather": 2, "all_gather": 3, "all_to_all": 0}


def each(obj: Any, ranks: Any) -> list[Any]:
    """One object for each rank; the last of them is the one that matters."""
    return [None] * (len(ranks or range(4)) - 1) + [obj]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check_that_all_works(rank: int) -> None:
    """Every call, after whatever happened before."""
    value = {"t": torch.arange(200_000), "rank": rank}
    for src in range(4):
        assert objcomm.broadcast_object(rank, src) == src
        assert objcomm.scatter_objects([10, 11, 12, 13] if rank == src else None, src) == 10 + rank
        gathered = objcomm.gather_objects(rank, src)
        assert gathered == ([0, 1, 2, 3] if rank == src else None)
    assert objcomm.all_to_all_objects([(rank, to) for to in range(4)]) == [(source, rank) for source in range(4)]
    for source, arrived in enumerate(objcomm.all_gather_objects(value)):
        assert_arrived(arrived, {**value, "rank": source})


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_cannot_be_encoded(name: str, backend: str) -> None:
    def ranks(rank: int) -> None:
        sender = SENDERS[name]
        for bad in ({"a": [threading.Lock()]}, {"big": torch.zeros(300_000), "a": [threading.Lock()]}):
            began = time.monotonic()
            with pytest.raises(objcomm.ObjcommError) as caught:
                CALLS[name](bad if rank == sender else torch.zeros(150_000))
            error = caught.value
            assert time.monotonic() - began < 10
            assert type(error) is (objcomm.EncodeError if rank == sender else objcomm.PeerError)
            assert error.path == "obj['a'][0]"
            assert error.rank == rank
            if rank != sender:
                assert error.peer == sender
                assert f"rank {sender} could not send its object: EncodeError" in str(error)
        check_that_all_works(rank)

    run_ranks(ranks, 4, backend=backend)


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_is_too_large(name: str, backend: str) -> None:
    def ranks(rank: int) -> None:
        objcomm.configure(max_bytes=8 << 20)
        with pytest.raises(objcomm.LimitError) as caught:
            CALLS[name](torch.zeros(3 << 20) if rank == SENDERS[name] else None)
        assert caught.value.rank == rank
        check_that_all_works(rank)

    run_ranks(ranks, 4, backend=backend)


@pytest.mark.parametrize(
    ("name", "missing", "backend"),
    [
        # The rank in the middle of the call, and others.
        *[("broadcast", missing, "gloo") for missing in (0, 1, 3)],
        *[("scatter", missing, "gloo") for missing in (1, 2)],
        *[("gather", missing, "gloo") for missing in (1, 3)],
        *[("all_gather", missing, "gloo") for missing in (0, 2)],
        ("all_to_all", 2, "gloo"),
        *[(name, 3, "strict") for name in CALLS],
    ],
)
def test_a_rank_that_never_calls_is_named_on_all_others(name: str, missing: int, backend: str) -> None:
    def ranks(rank: int) -> None:
        check_that_all_works(rank)
        if rank == missing:
            time.sleep(4)
            return
        began = time.monotonic()
        with pytest.raises(objcomm.TransferTimeout) as caught:
            CALLS[name]("x", timeout=1.0)
        assert time.monotonic() - began < 6
        assert caught.value.peer == missing
        assert caught.value.rank == rank
        assert f"rank {missing}" in str(caught.value)

    run_ranks(ranks, 4, backend=backend)


def test_a_rank_that_comes_late_is_not_the_one_that_is_missing(backend: str) -> None:
    def ranks(rank: int) -> None:
        check_that_all_works(rank)
        if rank == 2:
            time.sleep(8)
            return
        # Rank 0 is the root of an all_gather: it comes late, and others give up before it does.
        time.sleep(1.0 if rank == 0 else 0.0)
        with pytest.raises(objcomm.TransferTimeout, match="rank 2") as caught:
            objcomm.all_gather_objects("x", timeout=2.0)
        assert caught.value.peer == 2

    run_ranks(ranks, 4, backend=backend)


def test_two_ranks_that_never_call(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank in (0, 3):
            time.sleep(4)
            return
        with pytest.raises(objcomm.TransferTimeout, match="ranks 0, 3 have not made this call within 1 s"):
            objcomm.all_gather_objects("x", timeout=1.0)

    run_ranks(ranks, 4, backend=backend)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_dies(name: str) -> None:
    def ranks(rank: int) -> None:
        check_that_all_works(rank)
        if rank == 3:
            os._exit(3)
        began = time.monotonic()
        with pytest.raises(objcomm.PeerError) as caught:
            CALLS[name]("x", timeout=20)
        assert time.monotonic() - began < 10
        assert caught.value.peer == 3

    run_ranks(ranks, 4, may_die=(3,))


def test_ranks_that_make_different_calls(backend: str) -> None:
    def ranks(rank: int) -> None:
        with pytest.raises((objcomm.ProtocolError, objcomm.PeerError)) as caught:
            if rank == 2:
                objcomm.all_gather_objects("x")
            else:
                objcomm.broadcast_object("x", 0)
        assert "<all_gather>" in str(caught.value) or "<broadcast from 0>" in str(caught.value)
        check_that_all_works(rank)

    run_ranks(ranks, 4, backend=backend)


@pytest.mark.parametrize("name", CALLS)
def test_calls_among_other_ranks_are_told_apart(name: str, backend: str) -> None:
    """Two ranks make two calls in a different order, that differ in nothing but the ranks that take part."""

    def ranks(rank: int) -> None:
        few, all_ = [0, 1], [0, 1, 2]
        began = time.monotonic()
        if rank == 2:
            # What comes to this rank may be whole; what is of the other call must not come.
            with contextlib.suppress(objcomm.ObjcommError):
                assert f"among {few}" not in repr(CALLS[name](f"among {all_}", ranks=all_, timeout=5))
        else:
            first, second = (few, all_) if rank == 0 else (all_, few)
            with pytest.raises((objcomm.ProtocolError, objcomm.PeerError), match=" among 0,1"):
                CALLS[name](f"among {first}", ranks=first, timeout=5)
            with pytest.raises(objcomm.ObjcommError):
                CALLS[name](f"among {second}", ranks=second, timeout=5)
        assert time.monotonic() - began < 30

    run_ranks(ranks, 3, backend=backend, timeout=90)


def test_one_rank_waits_with_a_handle_and_the_others_do_not(backend: str) -> None:
    def ranks(rank: int) -> None:
        value = {"big": torch.zeros(3 << 20)}
        began = time.monotonic()
        with pytest.raises(objcomm.ObjcommError):
            if rank == 0:
                handle: Any = objcomm.broadcast_object(value, 0, async_op=True)
                handle.wait(timeout=2)
                objcomm.recv_object(1, timeout=2)
            else:
                objcomm.broadcast_object(None, 0, timeout=2)
        assert time.monotonic() - began < 9

    run_ranks(ranks, 2, backend=backend)


class CannotBeBuilt:
    """An object that is sent well and fails on arrival."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> None:
    raise RuntimeError("not here")


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_cannot_be_rebuilt_concerns_only_who_receives_it(name: str, backend: str) -> None:
    def ranks(rank: int) -> None:
        sender = SENDERS[name]
        receivers = {
            "broadcast": [0, 2, 3],
            "scatter": [3],
            "gather": [1],
            "all_gather": [0, 1, 2],
            "all_to_all": [3],
        }[name]
        for large in (None, torch.zeros(1 << 20)):
            obj = [CannotBeBuilt(), large] if rank == sender else None
            if rank in receivers:
                with pytest.raises(objcomm.DecodeError, match="not here") as caught:
                    CALLS[name](obj)
                assert caught.value.peer == sender
            else:
                CALLS[name](obj)
        check_that_all_works(rank)

    run_ranks(ranks, 4, backend=backend)


def test_restricted_trust_refuses_on_the_receiver_alone(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 2:
            objcomm.configure(trust="restricted")
        for large in (None, torch.zeros(3 << 20)):
            obj = [CannotBeBuilt, lambda: 1, large] if rank == 0 else None
            if rank == 2:
                with pytest.raises(objcomm.TrustError):
                    objcomm.broadcast_object(obj, 0)
            else:
                arrived: Any = objcomm.broadcast_object(obj, 0)
                assert arrived[1]() == 1
        check_that_all_works(rank)

    run_ranks(ranks, 4, backend=backend)
