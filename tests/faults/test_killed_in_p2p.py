"""A peer that is killed in every step of a transfer between two ranks, on every transport."""

from __future__ import annotations

from typing import Any

import pytest

import objcomm
from tests.faults.jobs import CALL_SECONDS, TRANSPORTS, Fault, Team, cases, check_held, report_of
from tests.faults.phases import LOCAL_RECEIVER, RECEIVER, SENDER, Phase, is_payload, payload

_MIB = 64


def _one_way(src: int, kind: str) -> Any:
    def call(rank: int) -> None:
        if rank == src:
            objcomm.send_object(payload(kind, _MIB), 1 - rank, timeout=CALL_SECONDS)
        else:
            assert is_payload(objcomm.recv_object(src, timeout=CALL_SECONDS), kind)

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


@pytest.mark.parametrize(("transport", "team", "fault"), cases(teams))
def test_a_peer_that_is_killed(transport: str, team: str, fault: str) -> None:
    assert report_of(transport, teams).problems(team, fault) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_of_it(transport: str) -> None:
    check_held(report_of(transport, teams), 96 << 20)
