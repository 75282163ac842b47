"""Object -> parts. A scan finds out what is in the object before anything is packed.

For every object that is not native the scan makes the part that stands for it; packing then only looks parts up, so no
code of a user runs inside msgpack, and an object that occurs twice has one part.
"""

from __future__ import annotations

import gc
from typing import Any

from msgpack import ExtType

from ..config import Trust
from ..errors import EncodeError
from . import codes, values
from .codes import Part, indexed
from .levels import CONTAINERS, MAX_LEVELS, NATIVE, SCALARS, Entangled, Trouble, has_big_bytes, kinds_of, narrowed
from .parts import Handler, NeedsPickle, Parts

_EXCESS = 1 << 20  # how many more parts than there are objects may be packed before the repetition is looked into


class Scan(Parts):
    """All that one message holds beside native values.

    Args:
        careful: native containers are visited once each, however deep; without it, an object that is too deep or
            repeats itself raises :class:`Entangled`.
        forbid_grad: a tensor that requires grad cannot be sent.
    """

    def __init__(self, trust: Trust, threshold: int, *, careful: bool = False, forbid_grad: bool = False) -> None:
        super().__init__(trust, threshold, forbid_grad)
        self.mistaken = careful
        self._handlers: dict[type, Handler | None] = dict.fromkeys(SCALARS)
        self._visited: set[int] | None = set() if careful else None
        self._budget = _EXCESS

    def release(self) -> None:
        """Let go of what refers back to this scan: nothing of a message shall live until cycles are collected."""
        self._handlers.clear()

    def walk(self, level: list[Any]) -> None:
        """Make parts for all that is reachable from these objects.

        Raises:
            Trouble: an object cannot be sent.
            Entangled: there are more levels than msgpack nests.
        """
        visited = None if self._no_pickle else self._visited
        seen: set[int] = set()
        levels = 0
        while level:
            levels += 1
            if levels > MAX_LEVELS and visited is None:
                raise Entangled
            kinds = kinds_of(level)
            if bytes in kinds and has_big_bytes(level, self.threshold):
                self._move_big_bytes(level)
            inside: list[Any] = []
            if not kinds <= NATIVE:
                level, inside = self._expand(level, kinds, seen)
            elif kinds.isdisjoint(CONTAINERS):
                return
            if visited is None:
                level = gc.get_referents(*narrowed(level))
            else:
                fresh = {id(obj): obj for obj in level if type(obj) in CONTAINERS and id(obj) not in visited}
                visited.update(fresh)
                level = gc.get_referents(*fresh.values())
            level += inside

    def _move_big_bytes(self, level: list[Any]) -> None:
        self.mistaken = True
        for obj in level:
            if type(obj) is bytes and len(obj) >= self.threshold and id(obj) not in self._parts:
                self.remember(obj, indexed(codes.BIG_BYTES, self.memory.add_bytes(obj)))

    def _expand(self, level: list[Any], kinds: set[type], seen: set[int]) -> tuple[list[Any], list[Any]]:
        """The native containers of a level, and what is inside of its other objects, each of which gets its part."""
        handlers, parts, no_pickle = self._handlers, self._parts, self._no_pickle
        for kind in kinds - CONTAINERS:
            if kind not in handlers:
                handlers[kind] = self.handler(kind)
        containers: list[Any] = []
        inside: list[Any] = []
        obj: Any = None
        try:
            for obj in level:
                kind = type(obj)
                if kind in CONTAINERS:
                    containers.append(obj)
                    continue
                handle = handlers[kind]
                if handle is None:
                    continue
                key = id(obj)
                part = parts.get(key)
                if part is None:
                    part = handle(obj)
                    if part is None:
                        part = self.other(obj)
                    self.remember(obj, part)
                elif not no_pickle or key in seen:
                    if type(part) is list and not self.repeats:
                        self.repeats = kind in self.dataclasses or not SCALARS.issuperset(map(type, part[1:]))
                    continue
                elif type(part) is ExtType and part.code == codes.OPAQUE:
                    raise NeedsPickle
                if no_pickle:
                    seen.add(key)
                    self._in_composites.add(key)
                if type(part) is list:
                    inside += part[1:]
        except (NeedsPickle, Entangled):
            raise
        except Trouble as trouble:
            trouble.objs.append(obj)
            raise
        except Exception as error:
            raise Trouble(obj) from error
        return containers, inside

    def part(self, obj: Any) -> Part:
        """What msgpack packs in place of an object that it has no type for.

        Raises:
            Entangled: far more is being packed than there are objects.
        """
        self._budget -= 1
        part = self._parts.get(id(obj))
        if part is None:
            if type(obj) is int:
                return values.big_integer(obj)
            raise EncodeError("the object was changed by another thread while it was encoded")
        if self._budget < -4 * len(self._parts):
            raise Entangled
        return part
