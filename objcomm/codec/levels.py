"""Breadth first through an object at C speed, as long as all of it is native: what msgpack packs as what it is."""

from __future__ import annotations

import gc
from itertools import compress
from typing import Any

import torch

from .tensors import PLAIN_TYPES

SCALARS = frozenset((type(None), bool, int, float, str, bytes))
CONTAINERS = frozenset((list, dict))
NATIVE = SCALARS | CONTAINERS
_NATIVE_OR_TENSOR = NATIVE | PLAIN_TYPES

MAX_LEVELS = 200  # older versions of msgpack nest 511 levels
_WIDE = 1 << 16  # objects on a level from which on it is worth a look whether they are the same few
_MOST_TENSORS = 1 << 20  # from so many on it is worth a look whether they are the same few


class Trouble(Exception):
    """An object that cannot be sent; the cause is chained.

    Attributes:
        objs: the object, then the composites that it is in, from the inside out.
        pickled: it is a leaf of the pickle stream, so what fails may be deep inside of it.
    """

    def __init__(self, *objs: object, pickled: bool = False) -> None:
        super().__init__()
        self.objs = list(objs)
        self.pickled = pickled


class Entangled(Exception):
    """The object is too deep, contains itself, or repeats its parts too often to be packed as it is."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply, contains itself or repeats its parts too often")


def survey(root: Any, threshold: int) -> tuple[list[Any] | None, list[torch.Tensor]]:
    """Look for what msgpack has no type for, level by level, breadth first.

    Returns:
        None if all is native, and bytes are smaller than ``threshold``; else the first level that is not so. And,
        where tensors of torch's own types are all that is not native, these, as often as they occur, else nothing.

    Raises:
        Entangled: there are more levels than msgpack nests.
    """
    level = [root]
    foreign: list[Any] | None = None
    tensors: list[torch.Tensor] = []
    try:
        for _ in range(MAX_LEVELS):
            kinds = set(map(type, level))
            if bytes in kinds and has_big_bytes(level, threshold):
                return foreign or level, []
            if not kinds <= NATIVE:
                foreign = foreign or level
                if not kinds <= _NATIVE_OR_TENSOR or len(tensors) + len(level) > _MOST_TENSORS:
                    return foreign, []
                if kinds <= PLAIN_TYPES:
                    tensors += level
                    return foreign, tensors
                tensors += compress(level, map(PLAIN_TYPES.__contains__, map(type, level)))
                if kinds.isdisjoint(CONTAINERS):
                    return foreign, tensors
                level = list(compress(level, map(CONTAINERS.__contains__, map(type, level))))
            elif kinds.isdisjoint(CONTAINERS):
                return foreign, tensors
            level = gc.get_referents(*(level if len(level) < _WIDE else narrowed(level)))
            if not level:
                return foreign, tensors
    except Entangled:
        raise
    except Exception:
        kinds_of(level)  # names the object whose type cannot be hashed
        raise
    raise Entangled


def kinds_of(level: list[Any]) -> set[type]:
    try:
        return set(map(type, level))
    except Exception as error:
        raise Trouble(*(obj for obj in level if not _is_hashable(type(obj)))) from error


def _is_hashable(kind: type) -> bool:
    try:
        hash(kind)
    except Exception:
        return False
    return True


def has_big_bytes(level: list[Any], threshold: int) -> bool:
    return any(type(obj) is bytes and len(obj) >= threshold for obj in level)


def narrowed(level: list[Any]) -> list[Any]:
    """The level itself or, of a wide one, its containers alone.

    Raises:
        Entangled: the containers are the same few again and again; each level might double.
    """
    if len(level) < _WIDE:
        return level
    containers = [obj for obj in level if type(obj) in CONTAINERS]
    if len(containers) >= _WIDE and len(set(map(id, containers))) * 2 < len(containers):
        raise Entangled
    return containers
