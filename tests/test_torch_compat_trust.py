"""weights_only: that one call is in restricted trust, whatever is configured, whichever thread takes its message."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import objcomm
from objcomm import torch_compat
from objcomm.config import restricted_trust, settings, trust_here
from objcomm.torch_compat.calls import CHANNEL
from tests.ranks import run_ranks
from tests.same import assert_arrived
from tests.values import SAFE, Config, Plain

BACKENDS = ["gloo", "strict"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_ran: list[str] = []


def run_code(text: str) -> str:
    _ran.append(text)
    return text


def times_run() -> int:
    """In this process. (The list itself would be copied into the function of a rank.)"""
    return len(_ran)


class Attack:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return run_code, ("attack",)


def _all_calls(obj: Any, rank: int, weights_only: bool) -> list[Any]:
    """An object of rank 0 by every call, on two ranks; what arrives on rank 1 or is raised."""
    outcomes: list[Any] = []

    def attempt(call: Any, result: Any) -> None:
        try:
            call()
        except objcomm.ObjcommError as error:
            outcomes.append(error)
        else:
            outcomes.append(result())

    mine = obj if rank == 0 else 0
    one: list[Any] = [mine]
    attempt(lambda: torch_compat.broadcast_object_list(one, weights_only=weights_only), lambda: one[0])
    out: list[Any] = [None]
    objects = [obj, obj] if rank == 0 else None
    attempt(lambda: torch_compat.scatter_object_list(out, objects, weights_only=weights_only), lambda: out[0])
    everybodys: list[Any] = [None] * 2
    attempt(lambda: torch_compat.all_gather_object(everybodys, mine, weights_only=weights_only), lambda: everybodys[0])
    gathered: list[Any] | None = [None] * 2 if rank == 1 else None
    attempt(
        lambda: torch_compat.gather_object(mine, gathered, 1, weights_only=weights_only),
        lambda: gathered[0] if gathered else None,
    )
    sent: list[Any] = [mine]
    if rank == 0:
        attempt(lambda: torch_compat.send_object_list(sent, 1, weights_only=weights_only), lambda: None)
    else:
        attempt(lambda: torch_compat.recv_object_list(sent, 0, weights_only=weights_only), lambda: sent[0])
    return outcomes


def test_what_is_safe_arrives(backend: str) -> None:
    def ranks(rank: int) -> None:
        for _, make in SAFE[::4]:
            torch.manual_seed(3)
            value = make()
            outcomes = _all_calls(value, rank, True)
            if rank == 1:
                for each in outcomes:
                    assert_arrived(each, value)
        for each in _all_calls(Config("c", [torch.ones(3)], {"a": (1, None)}), rank, True):
            assert not isinstance(each, Exception)

    run_ranks(ranks, 2, backend=backend)


def test_what_would_be_pickled_is_refused_on_both_ends_and_the_next_call_works(backend: str) -> None:
    def ranks(rank: int) -> None:
        for bad in (Plain(a=1), [{"x": Attack()}], ValueError("an exception"), torch.nn.Linear(2, 2)):
            for error in _all_calls(bad, rank, True):
                assert isinstance(error, objcomm.TrustError if rank == 0 else objcomm.PeerError), error
                if rank == 0:
                    assert isinstance(error, pickle.UnpicklingError)  # what torch raises where it unpickles
            assert times_run() == 0
            if not isinstance(bad, list):
                arrived = _all_calls(bad, rank, False)
                assert rank == 0 or {type(each) for each in arrived} == {type(bad)}
        _all_calls(Attack(), rank, False)
        assert times_run() > 0

    run_ranks(ranks, 2, backend=backend)


def test_the_receivers_own_word_decides(backend: str) -> None:
    """The sender does not ask for it; the receiver does, and runs nothing of what came."""

    def ranks(rank: int) -> None:
        outcomes = _all_calls([Attack()], rank, rank == 1)
        if rank == 1:
            for error in outcomes:
                assert isinstance(error, objcomm.TrustError), error
                assert isinstance(error, pickle.UnpicklingError)
            assert times_run() == 0
        everybodys: list[Any] = [None] * 2
        torch_compat.all_gather_object(everybodys, Plain(rank=rank))
        assert [each.rank for each in everybodys] == [0, 1]

    run_ranks(ranks, 2, backend=backend)


def test_a_receive_keeps_the_trust_that_it_was_made_with() -> None:
    """Whoever takes its message: a receive that was posted ahead is taken by the thread of a later one."""

    def ranks(rank: int) -> None:
        if rank == 0:
            for _ in range(4):
                objcomm.send_object([Attack()], 1, channel=CHANNEL)
            return
        with restricted_trust():
            careful = objcomm.irecv_object(0, channel=CHANNEL)
        trusting = objcomm.irecv_object(0, channel=CHANNEL)
        with restricted_trust():
            again = objcomm.irecv_object(0, channel=CHANNEL)
            assert trusting.wait() == ["attack"]
        assert times_run() == 1
        assert objcomm.recv_object(0, channel=CHANNEL) == ["attack"]
        for each in (careful, again):
            with pytest.raises(objcomm.TrustError):
                each.wait()
        assert times_run() == 2

    run_ranks(ranks, 2)


def test_the_scope_of_restricted_trust() -> None:
    before = settings()
    with restricted_trust():
        with restricted_trust(False):  # what is inside cannot widen it
            assert trust_here() == "restricted"
        assert settings() == before
        with pytest.raises(ZeroDivisionError), restricted_trust():
            raise ZeroDivisionError
        assert trust_here() == "restricted"
    assert trust_here() == before.trust == "cluster"
