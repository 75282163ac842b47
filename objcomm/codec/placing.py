"""Where the buffers of one area (the inline area, or what an accelerator gathered) lie in it.

The order is part of the protocol: first the small tensors, one densely packed group for each dtype in the order of
the dtypes' codes, each group at a multiple of 64; then everything else in its own order, each at a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

ALIGN = 64


class Places:
    """The places of buffers in one area.

    Attributes:
        groups: of each dtype that has any: its code, where its group starts and ends, the buffers in it.
        singles: every other buffer: where it starts and ends, and which it is.
        nbytes: size of the area.
    """

    __slots__ = ("groups", "nbytes", "singles")

    def __init__(self, buffers: Iterable[tuple[int, int, int]]) -> None:
        """``buffers``: which, its bytes, and the code of the dtype with which it is gathered or -1."""
        grouped: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        singles: list[tuple[int, int]] = []
        for buffer, nbytes, code in buffers:
            if code < 0:
                singles.append((buffer, nbytes))
            elif code in grouped:
                grouped[code].append(buffer)
                sizes[code] += nbytes
            else:
                grouped[code] = [buffer]
                sizes[code] = nbytes
        self.groups: list[tuple[int, int, int, list[int]]] = []
        self.singles: list[tuple[int, int, int]] = []
        end = 0
        for code in sorted(grouped):
            start = -(-end // ALIGN) * ALIGN
            end = start + sizes[code]
            self.groups.append((code, start, end, grouped[code]))
        for buffer, nbytes in singles:
            start = -(-end // ALIGN) * ALIGN
            end = start + nbytes
            self.singles.append((start, end, buffer))
        self.nbytes = end

    def gaps(self) -> list[tuple[int, int]]:
        """The stretches between buffers."""
        spans = [(start, end) for _, start, end, _ in self.groups] + [(start, end) for start, end, _ in self.singles]
        return [(before[1], after[0]) for before, after in pairwise(spans) if before[1] < after[0]]
