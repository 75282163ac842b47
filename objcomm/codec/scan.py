"""Object -> parts. A scan finds out what is in the object before anything is packed.

The scan goes breadth first and at C speed through native values (what msgpack packs as what it is). For every other
object it makes the *part* that stands for it; packing then only looks parts up, so no code of a user runs inside
msgpack, and an object that occurs twice has one part.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from msgpack import ExtType, Timestamp  # type: ignore[import-untyped]

from ..config import Trust
from ..errors import EncodeError, TrustError
from . import arrays, classes, codes, numpy_values, registry, tensors, values
from .codes import Part, ext, indexed
from .instances import ClassTable
from .memory import Memory, MemoryWriter
from .path import describe

SCALARS = frozenset((type(None), bool, int, float, str, bytes))
CONTAINERS = frozenset((list, dict))
_NATIVE = SCALARS | CONTAINERS
# msgpack packs these as something else without a word, whatever strict_types says.
_MISTAKEN = frozenset((bytearray, memoryview, ExtType, Timestamp))

MAX_LEVELS = 200  # older versions of msgpack nest 511 levels
_WIDE = 1 << 16  # objects on a level from which on it is worth a look whether they are the same few
_EXCESS = 1 << 20  # how many more parts than there are objects may be packed before the repetition is looked into

_Handler = Callable[[Any], "Part | None"]


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


class _NeedsPickle(Exception):
    """Part of a composite can only be pickled, so the composite has to go into the stream as well."""


def first_foreign(root: Any, threshold: int) -> list[Any] | None:
    """The first level, breadth first, that holds something not native, or bytes of at least ``threshold``.

    None if there is no such level.

    Raises:
        Entangled: there are more levels than msgpack nests.
    """
    level = [root]
    for _ in range(MAX_LEVELS):
        kinds = _kinds(level)
        if not kinds <= _NATIVE or (bytes in kinds and _has_big_bytes(level, threshold)):
            return level
        if kinds.isdisjoint(CONTAINERS):
            return None
        level = gc.get_referents(*_narrowed(level))
    raise Entangled


def _kinds(level: list[Any]) -> set[type]:
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


def _has_big_bytes(level: list[Any], threshold: int) -> bool:
    return any(type(obj) is bytes and len(obj) >= threshold for obj in level)


def _narrowed(level: list[Any]) -> list[Any]:
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


class Scan:
    """All that one message holds beside native values.

    Args:
        careful: native containers are visited once each, however deep; without it, an object that is too deep or
            repeats itself raises :class:`Entangled`.

    Attributes:
        mistaken: some container holds what msgpack would mistake for something else, so the tree has to be rewritten.
        leaves: what the pickle stream holds.
        composites: name and parts of each, in front of those that it is a part of.
    """

    def __init__(self, trust: Trust, threshold: int, careful: bool = False) -> None:
        self.restricted = trust == "restricted"
        self.threshold = threshold
        self._memory: MemoryWriter | None = None
        self.classes = ClassTable()
        self.mistaken = careful
        self.leaves: list[Any] = []
        self.composites: list[tuple[str, list[Any]]] = []
        self._parts: dict[int, Part] = {}
        self._alive: list[Any] = []  # no id in _parts is used again
        self._handlers: dict[type, _Handler | None] = dict.fromkeys(SCALARS)
        self._flattened: dict[int, tuple[str, list[Any]]] = {}
        self._in_stream: set[int] = set()
        self._open: set[int] = set()
        self._no_pickle = False
        self._visited: set[int] | None = set() if careful else None
        self._budget = _EXCESS

    @property
    def memory(self) -> MemoryWriter:
        if self._memory is None:
            self._memory = MemoryWriter(self.threshold)
        return self._memory

    def finish(self) -> Memory | None:
        """The memory of the message, if it has any."""
        return None if self._memory is None else self._memory.finish()

    # -- all objects -------------------------------------------------------------------------------------------------

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
            kinds = _kinds(level)
            if bytes in kinds and _has_big_bytes(level, self.threshold):
                self._move_big_bytes(level)
            inside: list[Any] = []
            if not kinds <= _NATIVE:
                level, inside = self._expand(level, kinds, seen)
            elif kinds.isdisjoint(CONTAINERS):
                return
            if visited is None:
                level = gc.get_referents(*_narrowed(level))
            else:
                fresh = {id(obj): obj for obj in level if type(obj) in CONTAINERS and id(obj) not in visited}
                visited.update(fresh)
                level = gc.get_referents(*fresh.values())
            level += inside

    def _move_big_bytes(self, level: list[Any]) -> None:
        self.mistaken = True
        for obj in level:
            if type(obj) is bytes and len(obj) >= self.threshold and id(obj) not in self._parts:
                self._remember(obj, indexed(codes.BIG_BYTES, self.memory.add_bytes(obj)))

    def _expand(self, level: list[Any], kinds: set[type], seen: set[int]) -> tuple[list[Any], list[Any]]:
        """The native containers of a level, and what is inside of its other objects, each of which gets its part."""
        handlers, parts, no_pickle = self._handlers, self._parts, self._no_pickle
        for kind in kinds - CONTAINERS:
            if kind not in handlers:
                handlers[kind] = self._handler(kind)
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
                    self._remember(obj, part)
                elif not no_pickle or key in seen:
                    continue
                elif type(part) is ExtType and part.code == codes.OPAQUE:
                    raise _NeedsPickle
                if no_pickle:
                    seen.add(key)
                if type(part) is list:
                    inside += part[1:]
        except (_NeedsPickle, Entangled):
            raise
        except Trouble as trouble:
            trouble.objs.append(obj)
            raise
        except Exception as error:
            raise Trouble(obj) from error
        return containers, inside

    def _remember(self, obj: Any, part: Part) -> None:
        self._parts[id(obj)] = part
        self._alive.append(obj)

    def known(self, obj: Any) -> Part | None:
        """The part of an object that the walk has come to."""
        return self._parts.get(id(obj))

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

    # -- one object --------------------------------------------------------------------------------------------------

    def _handler(self, kind: type) -> _Handler:
        """What makes the part of an object of that type, or says None: then :meth:`other` looks at it."""
        if kind in _MISTAKEN:
            self.mistaken = True
            if kind is bytearray:
                return self._bytearray
            if kind is memoryview:
                return _refuse_memoryview
        handler = values.ENCODERS.get(kind)
        if handler is not None:
            return handler
        if issubclass(kind, torch.Tensor):
            return self._tensor
        layout = classes.layout(kind)
        if layout is not None:
            return lambda obj: self._instance(layout, obj)
        np = sys.modules.get("numpy")
        if np is not None:
            if kind is np.ndarray:
                return self._array
            if issubclass(kind, np.generic):
                return self._numpy_scalar
            if issubclass(kind, np.dtype):
                return self._numpy_dtype
        zoneinfo = sys.modules.get("zoneinfo")
        if zoneinfo is not None and kind is zoneinfo.ZoneInfo:
            return values.zone
        return self.other

    def other(self, obj: Any) -> Part:
        """A composite, or else a leaf of the pickle stream."""
        entry = registry.find(obj)
        return self._pickled(obj) if entry is None else self._composite(obj, entry)

    def _pickled(self, obj: Any) -> Part:
        if self.restricted:
            raise TrustError(
                f"{describe(obj)} would have to be pickled, and trust is restricted",
                hint="send it as plain values, a dataclass or tensors, or use cluster trust on both ranks",
            )
        if self._no_pickle:
            raise _NeedsPickle
        self.leaves.append(obj)
        return indexed(codes.OPAQUE, len(self.leaves) - 1)

    def pickled_later(self, obj: Any) -> Part:
        """A leaf for a container that contains itself."""
        try:
            return self._pickled(obj)
        except TrustError as error:
            error.text = f"{describe(obj)} contains itself, so it would have to be pickled, and trust is restricted"
            raise Trouble(obj) from error

    def _bytearray(self, obj: bytearray) -> Part:
        if len(obj) >= self.threshold:
            return indexed(codes.BIG_BYTEARRAY, self.memory.add_bytes(obj))
        return ext(codes.BYTEARRAY, bytes(obj))

    def _tensor(self, obj: torch.Tensor) -> Part:
        if tensors.is_plain(obj):
            return indexed(codes.MEMORY, self.memory.add_tensor(obj))
        entry = registry.find(obj)
        if entry is None:
            raise EncodeError(f"{describe(obj)} cannot be sent", hint="register its layout, or send its parts")
        return self._composite(obj, entry)

    def _array(self, obj: Any) -> Part | None:
        return indexed(codes.MEMORY, self.memory.add_array(obj)) if arrays.is_plain(obj) else None

    def _numpy_scalar(self, obj: Any) -> Part | None:
        part = numpy_values.scalar(obj)
        if part is None:
            array = numpy_values.record_as_array(obj)
            if array is not None and arrays.is_plain(array):
                return [ext(codes.NUMPY_RECORD), array]
        return part

    def _numpy_dtype(self, obj: Any) -> Part | None:
        part = numpy_values.dtype(obj)
        if part is None:
            array = numpy_values.empty(obj)
            if arrays.is_plain(array) and array.dtype == obj:
                return [ext(codes.NUMPY_RECORD_DTYPE), array]
        return part

    def _instance(self, layout: classes.Layout, obj: Any) -> Part | None:
        if layout.kind in ("enum", "flag"):
            index = self.classes.member(layout, obj)
            return None if index is None else indexed(codes.MEMBER, index)
        found = self.classes.values(layout, obj)
        return None if found is None else [indexed(codes.INSTANCE, found[0]), *found[1]]

    def _composite(self, obj: Any, entry: registry.Entry) -> Part:
        if entry.code and self.restricted:
            raise TrustError(f"{describe(obj)} holds code, and trust is restricted", hint="use cluster trust")
        key = id(obj)
        if key in self._open:
            raise _NeedsPickle
        if key not in self._flattened:
            self._flattened[key] = (entry.name, list(entry.flatten(obj)))
            self._alive.append(obj)
        name, parts = self._flattened[key]
        outer, self._no_pickle = self._no_pickle, True
        self._open.add(key)
        try:
            self.walk(parts)
        except (_NeedsPickle, Entangled):
            self._no_pickle = outer
            self._in_stream.add(key)
            return self._pickled(obj)
        finally:
            self._no_pickle = outer
            self._open.discard(key)
        self.composites.append((name, parts))
        return indexed(codes.COMPOSITE, len(self.composites) - 1)

    # -- inside the pickle stream ------------------------------------------------------------------------------------

    def out_of_band(self, obj: Any) -> int | None:
        """Twice the index of a memory leaf, or of a composite and one more; None for what the stream itself holds."""
        part = self._parts.get(id(obj))
        if part is None:
            if id(obj) in self._in_stream:
                return None
            kind = type(obj)
            np = sys.modules.get("numpy")
            self._no_pickle = True
            try:
                if issubclass(kind, torch.Tensor):
                    part = self._tensor(obj)
                elif np is not None and kind is np.ndarray:
                    part = self._array(obj)
                else:
                    entry = registry.find(obj)
                    part = None if entry is None else self._composite(obj, entry)
            except _NeedsPickle:
                return None
            if part is None:
                return None
            self._remember(obj, part)
        if type(part) is ExtType and part.code in (codes.MEMORY, codes.COMPOSITE):
            return int.from_bytes(part.data, "little") * 2 + (part.code == codes.COMPOSITE)
        return None

    def in_stream(self, obj: Any) -> tuple[str, list[Any]] | None:
        """Name and parts of a composite that goes into the stream."""
        return self._flattened.get(id(obj)) if id(obj) in self._in_stream else None


def _refuse_memoryview(obj: memoryview) -> Part:
    raise EncodeError("a memoryview cannot be sent", hint="send bytes(view), or an array or tensor over its memory")
