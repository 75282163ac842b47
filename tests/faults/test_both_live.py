"""Faults that leave both processes alive, on every transport: all calls end in time, well or with a typed error."""

from __future__ import annotations

import functools
import traceback

import pytest

from tests.faults.jobs import TRANSPORTS
from tests.faults.scenarios import EVERYWHERE, WITHIN_A_HOST, Scenario, play
from tests.ranks import run_ranks


def scenarios(transport: str) -> list[Scenario]:
    return EVERYWHERE + (WITHIN_A_HOST if transport == "local" else [])


@functools.cache
def outcomes(transport: str) -> dict[str, list[tuple[float, str]]]:
    """By scenario, of each rank the longest that an error took, and what was not as promised."""
    wanted = scenarios(transport)

    def ranks(rank: int) -> list[tuple[float, str]]:
        seen = []
        for scenario in wanted:
            try:
                seen.append((play(rank, scenario), ""))
            except BaseException:
                seen.append((0.0, traceback.format_exc()))
        return seen

    results = run_ranks(ranks, 2, backend=transport, timeout=150, group_timeout=25)
    return {scenario.__name__: [result[index] for result in results] for index, scenario in enumerate(wanted)}


CASES = [(transport, scenario.__name__) for transport in TRANSPORTS for scenario in scenarios(transport)]


@pytest.mark.parametrize(("transport", "scenario"), CASES)
def test_both_processes_live_on(transport: str, scenario: str) -> None:
    assert [problem for _, problem in outcomes(transport)[scenario]] == ["", ""]
