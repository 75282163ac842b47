"""A rank that is killed in every step of a call among several, on every transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import objcomm
from tests.faults.jobs import CALL_SECONDS, TRANSPORTS, Fault, Team, cases, check_held, report_of
from tests.faults.phases import MEMBER, is_payload, payload

_MIB = 12
_RANKS = 3
_ROOT = 0


def _made() -> Any:
    return payload("segment", _MIB)


def _broadcast(rank: int) -> None:
    assert _good(objcomm.broadcast_object(_made() if rank == _ROOT else None, _ROOT, timeout=CALL_SECONDS))


def _scatter(rank: int) -> None:
    objs = [_made() for _ in range(_RANKS)] if rank == _ROOT else None
    assert _good(objcomm.scatter_objects(objs, _ROOT, timeout=CALL_SECONDS))


def _gather(rank: int) -> None:
    arrived = objcomm.gather_objects(_made(), _ROOT, timeout=CALL_SECONDS)
    assert arrived is None if rank != _ROOT else _all_good(arrived)


def _all_gather(rank: int) -> None:
    assert _all_good(objcomm.all_gather_objects(_made(), timeout=CALL_SECONDS))


def _all_to_all(rank: int) -> None:
    assert _all_good(objcomm.all_to_all_objects([_made() for _ in range(_RANKS)], timeout=CALL_SECONDS))


def _good(arrived: Any) -> bool:
    return is_payload(arrived, "segment")


def _all_good(arrived: Any) -> bool:
    return len(arrived) == _RANKS and all(map(_good, arrived))


CALLS: dict[str, Callable[[int], None]] = {
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}
# Steps that a rank does not come to: the root of a broadcast receives no object, and so on.
_COMES, _DECODES = "in the middle of a segment that comes", "while decoding"
_NEVER: dict[tuple[str, bool], set[str]] = {
    ("broadcast", True): {_COMES, _DECODES},
    ("scatter", True): {_COMES, _DECODES},
    ("gather", True): {"before it sends a segment"},
    ("gather", False): {_COMES, _DECODES},
    ("broadcast", False): {"before it sends a segment"},
    ("scatter", False): {"before it sends a segment"},
}


def teams(transport: str) -> list[Team]:
    return [
        Team(
            f"{name}, {'its root' if victim == _ROOT else 'another rank'}",
            _RANKS,
            [
                Fault(phase.name, victim, phase, call)
                for phase in MEMBER
                if phase.name not in _NEVER.get((name, victim == _ROOT), ())
            ],
        )
        for name, call in CALLS.items()
        for victim in (_ROOT, 2)
    ]


@pytest.mark.parametrize(("transport", "team", "fault"), cases(teams))
def test_a_rank_that_is_killed(transport: str, team: str, fault: str) -> None:
    assert report_of(transport, teams).problems(team, fault) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_of_it(transport: str) -> None:
    check_held(report_of(transport, teams), 96 << 20)
