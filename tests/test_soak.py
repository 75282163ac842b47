"""A few seconds of the soak, on every transport: every kind of call is made, and nothing goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import run, slope, summary
from benchmarks.soak_objects import checksum
from tests.ranks import run_ranks


def test_a_short_soak(backend: str) -> None:
    def ranks(rank: int) -> dict[str, Any]:
        # torch cannot destroy a group whose backend is written in Python without complaining.
        return run(4.0, seed=3, samples=4, steps_per_break=60 if backend != "strict" else 1 << 30)

    figures = summary(run_ranks(ranks, 3, backend=backend, timeout=110, group_timeout=60))
    assert figures["errors"] == 0
    assert figures["checked"] > 50
    assert len(figures["calls"]) > 8
    for before, after in figures["descriptors"]:
        assert after - before < 20


@pytest.mark.parametrize(
    ("one", "other"),
    [([1, 2], [2, 1]), ([1], (1,)), ({"a": 1}, {"b": 1}), (b"ab", b"ba"), (1.0, 1), ("1", 1), (lambda x: x, abs)],
)
def test_a_checksum_tells_what_differs(one: Any, other: Any) -> None:
    assert checksum(one) != checksum(other)
    assert checksum([one, one]) == checksum([one, one])


def test_a_slope_is_that_of_what_comes_after_the_warm_up() -> None:
    seen = [{"at": 0.0, "rss": 100.0}, {"at": 1.0, "rss": 10.0}, {"at": 2.0, "rss": 13.0}, {"at": 3.0, "rss": 16.0}]
    assert slope(seen, "rss", 0.5) == pytest.approx(3.0)
