"""Cost against size: one tensor of more and more bytes, more and more tensors of a few bytes, and how time grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .payloads import Payload

SMALLEST = 1 << 10
MOST_TENSORS = 10_000
ELEMENTS = 16
# By so much the cost of a byte, or of a tensor, may rise above its least: what is less is noise.
TOLERANCE = 1.25
# A method whose round trip would take more than so many times the seconds for one size is left out from there on.
_PATIENCE = 2.0
_METHODS = ("objcomm", "gloo", "torch", "raw", "mpi4py")


class Sweep(NamedTuple):
    """A payload for each of several sizes.

    Attributes:
        unit: what is counted, in singular.
        methods: those that are compared.
    """

    name: str
    title: str
    unit: str
    methods: tuple[str, ...]
    sizes: list[int]
    payload: Callable[[int], Payload]


def sweeps(largest: int) -> list[Sweep]:
    """The sweep over bytes, up to ``largest``, and that over tensors.

    >>> [sweep.sizes for sweep in sweeps(20_000)]
    [[1024, 4096, 16384, 20000], [1, 10, 100, 1000, 10000]]
    """
    sizes = [SMALLEST]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    if largest > SMALLEST:
        sizes.append(largest)
    counts = [10**power for power in range(round(math.log10(MOST_TENSORS)) + 1)]
    return [
        Sweep(
            "bytes",
            "one tensor",
            "byte",
            (*_METHODS, "memcpy"),
            sizes,
            lambda n: Payload(in_bytes(n), "", lambda: torch.ones(n, dtype=torch.uint8)),
        ),
        Sweep(
            "tensors",
            f"a list of tensors of {ELEMENTS} elements",
            "tensor",
            _METHODS,
            counts,
            lambda n: Payload(f"{n:,}", "", lambda: [torch.full((ELEMENTS,), float(i)) for i in range(n)]),
        ),
    ]


def in_bytes(number: int) -> str:
    """
    >>> in_bytes(1 << 10), in_bytes(256 << 20), in_bytes(1 << 30), in_bytes(1000)
    ('1 KiB', '256 MiB', '1 GiB', '1,000 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power and number % (1 << power) == 0:
            return f"{number >> power:,} {unit}"
    return f"{number:,} B"


def patient(names: Sequence[str], before: Mapping[str, Any] | None, factor: float, seconds: float) -> list[str]:
    """The methods that go on to a size that is ``factor`` times that of the row ``before``: those that would not take
    too long there, if none has failed or been left out already."""
    if before is None:
        return list(names)
    took = {name: found["median"] for name, found in before["methods"].items()}
    return [
        name
        for name in names
        if name not in before["left_out"] and 2 * factor * took.get(name, 0.0) <= _PATIENCE * seconds
    ]


class Growth(NamedTuple):
    """How the time of a method grows over a sweep.

    Attributes:
        sizes, times: how many times as much the last size is, and takes, as the first.
        cheapest, dearest: the two sizes, the smaller one first, between which the cost of a byte or of a tensor rises
            most, to ``rise`` times what it was.
        memcpy: the most by which the cost of a byte rises between two sizes in that range where it is only copied.
        fine: the time grows no faster than the size, noise and the machine's own memory aside.
    """

    method: str
    unit: str
    sizes: float
    times: float
    cheapest: int
    dearest: int
    rise: float
    memcpy: float | None
    fine: bool


Point = tuple[int, float]


def growth(method: str, unit: str, points: Sequence[Point], memcpy: Sequence[Point] = ()) -> Growth | None:
    """Judge ``points``, sizes and seconds in rising order, and as many of a ``memcpy``. ``None`` if one is too few.

    >>> points = [(1, 9.0), (10, 10.0), (100, 110.0), (1000, 2000.0)]
    >>> found = growth("objcomm", "byte", points)
    >>> found.cheapest, found.dearest, found.rise, found.fine
    (10, 1000, 2.0, False)
    >>> growth("objcomm", "byte", points, [(10, 1.0), (100, 20.0), (1000, 100.0)]).fine
    True
    """
    if len(points) < 2:
        return None
    low, high = _steepest(points)
    rise = _rise(low, high)
    within = [point for point in memcpy if low[0] <= point[0] <= high[0]]
    copied = _rise(*_steepest(within)) if len(within) > 1 else None
    sizes, times = points[-1][0] / points[0][0], points[-1][1] / points[0][1]
    fine = rise <= TOLERANCE * max(1.0, copied or 1.0)
    return Growth(method, unit, sizes, times, low[0], high[0], rise, copied, fine)


def _steepest(points: Sequence[Point]) -> tuple[Point, Point]:
    pairs = [(low, high) for place, low in enumerate(points) for high in points[place + 1 :]]
    return max(pairs, key=lambda pair: _rise(*pair))


def _rise(low: Point, high: Point) -> float:
    return (high[1] / high[0]) / (low[1] / low[0])


def growths(sweep: Sweep, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Growth]:
    """Of those methods that are there in more than one row. The quickest round of each size counts: what others do on
    the machine makes a round slower, and never quicker."""
    memcpy = _points(rows, "memcpy") if sweep.unit == "byte" else []
    found = (growth(name, sweep.unit, _points(rows, name), memcpy) for name in names)
    return [one for one in found if one is not None]


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    return [(row["size"], min(row["methods"][name]["times"])) for row in rows if name in row["methods"]]
