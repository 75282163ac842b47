"""Restricted trust on every way that an object can come: the sender trusts everybody, the receiver nobody."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import objcomm
from objcomm import autograd, torch_compat
from tests.hostile import Untouched
from tests.ranks import run_ranks

Way = Callable[[int, Any], Any]


def _move(rank: int, obj: Any) -> Any:
    return objcomm.move_object(obj if rank == 0 else None, 0, 1)


def _send(rank: int, obj: Any) -> Any:
    return objcomm.send_object(obj, 1) if rank == 0 else objcomm.recv_object(0)


def _isend(rank: int, obj: Any) -> Any:
    return objcomm.isend_object(obj, 1).wait() if rank == 0 else objcomm.irecv_object(0).wait()


def _exchange(rank: int, obj: Any) -> Any:
    return objcomm.exchange_objects(obj if rank == 0 else "mine", 1 - rank)


def _autograd(rank: int, obj: Any) -> Any:
    return autograd.send_object(obj, 1) if rank == 0 else autograd.recv_object(0).obj


P2P: dict[str, Way] = {
    "send_object": _send,
    "isend_object": _isend,
    "move_object": _move,
    "exchange_objects": _exchange,
    "autograd": _autograd,
}


def _collectives(**how: Any) -> dict[str, Way]:
    def waited(work: Any) -> Any:
        return work.wait() if how.get("async_op") else work

    def scatter(rank: int, obj: Any) -> Any:
        return waited(objcomm.scatter_objects(["own", obj] if rank == 0 else None, 0, **how))

    def gather(rank: int, obj: Any) -> Any:
        ranks = {name: value for name, value in how.items() if name == "ranks"}
        return objcomm.gather_objects(obj if rank == 0 else "own", 1, **ranks)

    def all_gather(rank: int, obj: Any) -> Any:
        return waited(objcomm.all_gather_objects(obj if rank == 0 else "own", **how))

    def all_to_all(rank: int, obj: Any) -> Any:
        return waited(objcomm.all_to_all_objects(["own", obj] if rank == 0 else ["a", "own"], **how))

    return {
        "broadcast": lambda rank, obj: waited(objcomm.broadcast_object(obj if rank == 0 else None, 0, **how)),
        "scatter": scatter,
        "gather": gather,
        "all_gather": all_gather,
        "all_to_all": all_to_all,
    }


def _drop_in() -> dict[str, Way]:
    def broadcast(rank: int, obj: Any) -> Any:
        objs = [obj if rank == 0 else None]
        torch_compat.broadcast_object_list(objs, 0)
        return objs

    def scatter(rank: int, obj: Any) -> Any:
        out: list[Any] = [None]
        torch_compat.scatter_object_list(out, ["own", obj] if rank == 0 else None, 0)
        return out

    def gather(rank: int, obj: Any) -> Any:
        out: list[Any] | None = [None, None] if rank == 1 else None
        torch_compat.gather_object(obj if rank == 0 else "own", out, 1)
        return out

    def all_gather(rank: int, obj: Any) -> Any:
        out: list[Any] = [None, None]
        torch_compat.all_gather_object(out, obj if rank == 0 else "own")
        return out

    def send(rank: int, obj: Any) -> Any:
        objs = [obj if rank == 0 else None]
        torch_compat.send_object_list(objs, 1) if rank == 0 else torch_compat.recv_object_list(objs, 0)
        return objs

    return {"broadcast": broadcast, "scatter": scatter, "gather": gather, "all_gather": all_gather, "send": send}


def _check(rank: int, ways: dict[str, Way], *, but: tuple[str, ...] = ()) -> None:
    """Every payload by every way: refused by rank 1, which is sent something good afterwards."""
    warnings.simplefilter("ignore")  # of torch.jit and torch.export
    if rank == 1:
        objcomm.configure(trust="restricted")
    untouched = Untouched()
    payloads = untouched.payloads() if rank == 0 else dict.fromkeys(Untouched().payloads())
    for way in ways.values():
        way(rank, "first")  # whatever is imported at the first use of something
    for name, call in ways.items():
        for kind, payload in payloads.items():
            if kind in but:
                continue
            if rank == 0:
                call(rank, payload)
                call(rank, {"good": torch.ones(3)})
                continue
            with untouched.watching():
                with pytest.raises(objcomm.TrustError):
                    call(rank, payload)
                good = call(rank, None)
            assert "good" in str(good) or good is None, (name, kind, good)


def test_point_to_point_and_autograd(backend: str) -> None:
    run_ranks(lambda rank: _check(rank, P2P), backend=backend, timeout=120)


def test_collectives_by_tree_and_star(backend: str) -> None:
    run_ranks(lambda rank: _check(rank, _collectives()), backend=backend, timeout=120)


def test_collectives_that_go_straight(backend: str) -> None:
    run_ranks(lambda rank: _check(rank, _collectives(async_op=True)), backend=backend, timeout=120)


def test_collectives_among_named_ranks(backend: str) -> None:
    run_ranks(lambda rank: _check(rank, _collectives(ranks=[0, 1])), backend=backend, timeout=120)


def test_drop_in(backend: str) -> None:
    by_value = ("class by value", "function")  # which torch's own calls do not send either
    run_ranks(lambda rank: _check(rank, _drop_in(), but=by_value), backend=backend, timeout=120)


def test_whoever_passes_something_on_runs_nothing_of_it(backend: str) -> None:
    """In a tree of six, rank 1 passes on what rank 0 has sent, and refuses it; rank 5, which is below it, takes it."""

    def ranks(rank: int) -> None:
        if rank == 1:
            objcomm.configure(trust="restricted")
        objcomm.broadcast_object("first", 0)
        untouched = Untouched()
        for payload in ([1, Nothing()], {"big": torch.ones(300_000), "n": Nothing()}):
            obj: Any = payload if rank == 0 else None
            if rank == 1:
                with untouched.watching(), pytest.raises(objcomm.TrustError):
                    objcomm.broadcast_object(obj, 0)
            else:
                arrived: Any = objcomm.broadcast_object(obj, 0)
                assert len(arrived) == 2
            assert objcomm.broadcast_object(rank, 0) == 0

    run_ranks(ranks, 6, backend=backend, timeout=120)


class Nothing:
    """It has to be pickled."""


def test_gradients(backend: str) -> None:
    """What comes back for an object is looked at as any object: by the trust of the rank that it comes back to."""

    def ranks(rank: int) -> None:
        untouched = Untouched()
        if rank == 1:
            objcomm.configure(trust="restricted")
            x = torch.ones(3, requires_grad=True)
            for channel in ("grad", ""):
                sent = autograd.send_object([x * 2], 0)
                with untouched.watching():
                    if channel:  # it comes while something else is waited for
                        assert objcomm.recv_object(0, channel=channel) == "between"
                    with pytest.raises(objcomm.TrustError):
                        sent.backward()
            sent = autograd.send_object([x * 2], 0)
            sent.backward()
            assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
            return
        for channel in ("grad", ""):
            autograd.recv_object(1)
            objcomm.send_object(untouched.payloads()["pickle"], 1, channel="objcomm.gradients")
            if channel:
                objcomm.send_object("between", 1, channel=channel)
        received = autograd.recv_object(1)
        received.obj[0].sum().backward()
        received.send_grads()

    run_ranks(ranks, backend=backend)


def test_gradients_that_are_none() -> None:
    """Of a kind that no tensor here can take, or of another shape: a typed error, and nothing else."""

    def ranks(rank: int) -> None:
        bad = [
            [0, 1, {0: torch.ones(3, device="meta")}],
            [0, 1, {0: torch.ones(4)}],
            [0, 1, {0: torch.ones(3, dtype=torch.complex64)}],
            [0, 1, {5: torch.ones(3)}],
            [0, 2, {}],
            [1 << 70, 1, {}],
            [[], {}, {}],
            {"a": 1},
        ]
        for index, message in enumerate(bad):
            if rank == 1:
                sent = autograd.send_object([torch.ones(3, requires_grad=True) * 2], 0)
                with pytest.raises(objcomm.ProtocolError):
                    sent.backward()
            else:
                autograd.recv_object(1)
                if isinstance(message, list) and type(message[0]) is int and message[0] == 0:
                    message = [index, *message[1:]]
                objcomm.send_object(message, 1, channel="objcomm.gradients")

    run_ranks(ranks)
