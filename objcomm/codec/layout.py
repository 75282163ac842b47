"""Where bytes lie in the inline area, and the table that says so: all that follows from the leaves' forms alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .address import FEW
from .form import Form
from .kept import Kept
from .placing import Buffers, Places

# Most messages of a program are like earlier ones. Longer ones cost more to keep than to lay out again.
_MOST_LEAVES = 1024
_layouts: Kept[tuple[Any, ...], Layout] = Kept(128)


class Layout:
    """Of a message what is the same for every other whose leaves have the same forms and share memory alike.

    Attributes:
        table: describes the memory to the receiver, in types that msgpack has.
        tables: a skeleton with nothing else in its tables, in front of its tree, as soon as somebody has packed it.
        nbytes: size of the inline area.
        gathers: small tensors of one dtype: its code, where they start and end, which, and whether they have one axis.
        copies: every other buffer, and where it starts.
        gaps: the stretches between them.
    """

    __slots__ = ("copies", "gaps", "gathers", "nbytes", "table", "tables")

    def __init__(
        self, sent: Sequence[Form], clusters: list[list[int]], owners: list[int | list[int]], buffers: Buffers
    ) -> None:
        numbers: dict[Form, int] = {}
        leaves = [numbers.setdefault(form, len(numbers)) for form in sent]
        self.table: list[Any] = [[form.wire() for form in numbers], leaves, clusters, owners]
        self.tables = b""
        places = Places(buffers)
        self.nbytes = places.nbytes
        self.gaps = places.gaps()
        self.gathers: list[tuple[int, int, int, Sequence[int], bool]] = []
        self.copies: list[tuple[int, int]] = []
        for code, start, end, members in places.groups:
            if len(members) > FEW:
                flat = all(len(form.shape) == 1 for form in numbers if form.group == code)
                self.gathers.append((code, start, end, members, flat))
                continue
            for buffer in members:
                self.copies.append((buffer, start))
                start += sent[buffer].hull
        self.copies += [(buffer, start) for start, _, buffer in places.singles]

    @staticmethod
    def earlier(forms: Sequence[Form], threshold: int) -> Layout | None:
        """The layout of an earlier message of tensors on the CPU, each in one piece, none in a segment."""
        return _layouts.get((threshold, *forms)) if len(forms) <= _MOST_LEAVES else None

    def keep(self, forms: Sequence[Form], threshold: int) -> None:
        """Be found by :meth:`earlier`."""
        if len(forms) <= _MOST_LEAVES and all(form.is_tensor for form in set(forms)):
            _layouts.keep((threshold, *forms), self)
