"""A peer that is killed in every step of a transfer between two ranks, on every transport."""

from __future__ import annotations

from typing import Any

import pytest

import objcomm
from tests.faults.jobs import TRANSPORTS, Fault, Outcome, Team, run_teams
from tests.faults.phases import LOCAL_RECEIVER, RECEIVER, SENDER, Phase, is_payload, payload

_MIB = 64


def _one_way(src: int, kind: str) -> Any:
    def call(rank: int) -> None:
        if rank == src:
            objcomm.send_object(payload(kind, _MIB), 1 - rank, timeout=20)
        else:
            assert is_payload(objcomm.recv_object(src, timeout=20), kind)

    return call


def _faults(phases: list[Phase], *, sends: bool) -> list[Fault]:
    # The victim is now the lower rank and now the higher one.
    faults = []
    for index, phase in enumerate(phases):
        victim = index % 2
        faults.append(Fault(phase.name, victim, phase, _one_way(victim if sends else 1 - victim, phase.payload)))
    return faults


def teams(transport: str) -> list[Team]:
    receiver = RECEIVER + (LOCAL_RECEIVER if transport == "local" else [])
    return [
        Team("sender", 2, _faults(SENDER, sends=True)),
        Team("receiver", 2, _faults(receiver, sends=False)),
    ]


CASES = [(transport, team.name, fault.name) for transport in TRANSPORTS for team in teams(transport) for fault in team.faults]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("transport", "victim", "phase"), CASES)
def test_a_peer_that_is_killed(transport: str, victim: str, phase: str, seen: dict[str, Any]) -> None:
    if transport not in seen:
        seen[transport] = run_teams(transport, teams(transport))
    outcomes: list[Outcome] = seen[transport][victim, phase]
    assert [outcome.problems for outcome in outcomes] == [[]]
