"""Where the buffers of one area (the inline area, or what an accelerator gathered) lie in it.

The order is part of the protocol: first the small tensors, one densely packed group for each dtype in the order of
the dtypes' codes, each group at a multiple of 64; then everything else in its own order, each at a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

ALIGN = 64


class Buffers(NamedTuple):
    """Buffers in columns, none of them empty.

    Attributes:
        numbers: which they are.
        sizes: of each its bytes.
        groups: of each the code of the dtype with which it is gathered, or -1.
    """

    numbers: Sequence[int]
    sizes: Sequence[int]
    groups: Sequence[int]

    @classmethod
    def of(cls, rows: list[tuple[int, int, int]]) -> Buffers:
        """From the number, size and group of each."""
        return cls(*zip(*rows, strict=True)) if rows else cls((), (), ())

    def by_group(self) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
        """Numbers and sizes of each group that occurs."""
        if len(set(self.groups)) == 1:
            return {self.groups[0]: (self.numbers, self.sizes)}
        found: dict[int, tuple[list[int], list[int]]] = {}
        for number, size, group in zip(self.numbers, self.sizes, self.groups, strict=True):
            columns = found.get(group)
            if columns is None:
                found[group] = [number], [size]
            else:
                columns[0].append(number)
                columns[1].append(size)
        return {**found}


class Places:
    """The places of buffers in one area.

    Attributes:
        groups: of each dtype that has any: its code, where its group starts and ends, the buffers in it.
        singles: every other buffer: where it starts and ends, and which it is.
        nbytes: size of the area.
    """

    __slots__ = ("groups", "nbytes", "singles")

    def __init__(self, buffers: Buffers) -> None:
        self.groups: list[tuple[int, int, int, Sequence[int]]] = []
        self.singles: list[tuple[int, int, int]] = []
        end = 0
        members = buffers.by_group()
        singles = members.pop(-1, ((), ()))
        for code in sorted(members):
            numbers, sizes = members[code]
            start = -(-end // ALIGN) * ALIGN
            end = start + sum(sizes)
            self.groups.append((code, start, end, numbers))
        for number, size in zip(*singles, strict=True):
            start = -(-end // ALIGN) * ALIGN
            end = start + size
            self.singles.append((start, end, number))
        self.nbytes = end

    def gaps(self) -> list[tuple[int, int]]:
        """The stretches between buffers."""
        spans = [(start, end) for _, start, end, _ in self.groups] + [(start, end) for start, end, _ in self.singles]
        return [(before[1], after[0]) for before, after in pairwise(spans) if before[1] < after[0]]
