"""What objcomm sets out to reach between two ranks of one host, and whether a run has reached it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# By the method that is measured and the one that it is measured against: how many times as fast, by payload.
AIMS = {
    ("objcomm", "torch"): {"P1": 15.0, "P2": 15.0, "P3": 11.0, "P4": 20.0, "P6": 1.8, "P7": 15.0, "P8": 65.0},
    ("objcomm", "mpi4py"): {"P1": 1.0, "P2": 1.0, "P3": 1.3, "P4": 2.5, "P6": 1.1, "P7": 1.0, "P8": 2.5},
    ("objcomm", "memcpy"): {"P5": 0.7},
    ("gloo", "torch"): {"P1": 4.0, "P2": 8.0, "P3": 9.0, "P4": 8.0, "P6": 1.4, "P7": 6.0, "P8": 55.0},
}
# Beside the object itself, on either end.
MEMORY_AIM = 16 << 20


class Verdict(NamedTuple):
    """One aim. ``found`` is ``None`` where it was not measured, which is no miss."""

    payload: str
    method: str
    other: str
    aim: float
    found: float | None
    reached: bool | None


def ratio(row: Mapping[str, Any], method: str, other: str) -> float | None:
    """How many times as fast ``method`` was as ``other``."""
    times = row["methods"]
    return times[other]["median"] / times[method]["median"] if method in times and other in times else None


def judge(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Every aim for the payloads that were measured.

    >>> row = {"name": "P1", "methods": {"objcomm": {"median": 1.0}, "torch": {"median": 12.0}}}
    >>> [verdict] = [one for one in judge([row]) if one.found is not None]
    >>> verdict.aim, verdict.found, verdict.reached
    (15.0, 12.0, False)
    """
    found = []
    for row in rows:
        for (method, other), aims in AIMS.items():
            if row["name"] in aims:
                aim, value = aims[row["name"]], ratio(row, method, other)
                found.append(Verdict(row["name"], method, other, aim, value, None if value is None else value >= aim))
        memory = row.get("memory")
        if memory is not None:
            most = max(memory.values())
            found.append(Verdict(row["name"], "objcomm", "memory", MEMORY_AIM, most, most <= MEMORY_AIM))
    return found
