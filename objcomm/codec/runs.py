"""Lists and dicts of many tensors in one piece: msgpack would ask Python for each of them, on both sides."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import is_, is_not
from typing import Any

import torch
from msgpack import ExtType

from . import codes
from .codes import Part, ext
from .levels import CONTAINERS, SCALARS

# A run of fewer is not worth the look.
_FEWEST = 16
# How deep, and among how many containers, it is looked for.
_MOST_LEVELS = 4
_MOST_CONTAINERS = 64

_RUN = struct.Struct("<II")
_NAMED = ext(codes.NAMED)


def fold(obj: Any, found: Sequence[torch.Tensor]) -> Part:
    """The object with a leaf in place of lists of tensors that are consecutive in the memory table, and dicts of such.

    Args:
        obj: lists, dicts, tensors and what msgpack has types for.
        found: all tensors in it, in the order of the memory table.
    """
    return _Folder(found).fold(obj, _MOST_LEVELS) if len(found) >= _FEWEST else obj


def is_folded(part: Part) -> bool:
    """Whether nothing is left of the tensors in what :func:`fold` has returned."""
    return type(part) is ExtType or (type(part) is list and bool(part) and part[0] is _NAMED)


def entries(data: bytes, count: int) -> slice:
    """Which of the ``count`` entries of the memory table a run stands for; it may go backwards.

    Raises:
        ValueError: it is malformed.
    """
    if len(data) != _RUN.size:
        raise ValueError(f"a run of tensors described by {len(data)} bytes")
    first, last = _RUN.unpack(data)
    if max(first, last) >= count:
        raise ValueError(f"a run of tensors from {first} to {last} of {count}")
    return _slice(first, last)


def _slice(first: int, last: int) -> slice:
    if last >= first:
        return slice(first, last + 1)
    return slice(first, last - 1 if last else None, -1)


def named(items: list[Any]) -> dict[Any, Any]:
    """A dict of a mark, its keys and its values. What the keys are runs nobody's code.

    Raises:
        ValueError: it is malformed.
    """
    keys, values = keys_and_values(items)
    return dict(zip(keys, values, strict=True))


def keys_and_values(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """What such a dict is made of.

    Raises:
        ValueError: it is malformed.
    """
    _, keys, values = items
    if type(keys) is not list or type(values) is not list or not set(map(type, keys)) <= SCALARS:
        raise ValueError("a dict of tensors whose keys are no plain values")
    return keys, values


class _Folder:
    def __init__(self, found: Sequence[torch.Tensor]) -> None:
        self._found = found
        self._index: dict[int, int] | None = None
        self._budget = _MOST_CONTAINERS
        # The receiver takes no more items in runs than there are tensors.
        self._left = len(found)

    def fold(self, part: Any, levels: int) -> Part:
        self._budget -= 1
        if type(part) is list:
            run = self._run(part)
            if run is not None:
                return run
            items = self._inside(part, levels)
            return part if items is None else items
        if type(part) is dict:
            values = list(part.values())
            run = self._run(values) if set(map(type, part)) <= SCALARS else None
            if run is not None:
                return [_NAMED, list(part), run]
            items = self._inside(values, levels)
            return part if items is None else dict(zip(part, items, strict=True))
        return part

    def _inside(self, items: list[Any], levels: int) -> list[Any] | None:
        """The items folded; None if there is nothing to fold, or too much to look at."""
        if not levels or len(items) > self._budget:
            return None
        folded = [self.fold(item, levels - 1) if type(item) in CONTAINERS else item for item in items]
        return folded if any(map(is_not, folded, items)) else None

    def _run(self, items: list[Any]) -> Part | None:
        count = len(items)
        if not _FEWEST <= count <= self._left or not isinstance(items[0], torch.Tensor):
            return None
        found = self._found
        first, last = self._place(items[0]), self._place(items[-1])
        # The collector's view of a list, in which the tensors were found, goes from its end to its beginning.
        if abs(last - first) != count - 1 or not all(map(is_, items, found[_slice(first, last)])):
            return None
        self._left -= count
        return ext(codes.RUN, _RUN.pack(first, last))

    def _place(self, item: object) -> int:
        """Where a tensor is among those that were found, or some place where it is not."""
        found = self._found
        if item is found[0]:
            return 0
        if item is found[-1]:
            return len(found) - 1
        if self._index is None:
            self._index = dict(zip(map(id, found), range(len(found)), strict=True))
        return self._index.get(id(item), 0)
