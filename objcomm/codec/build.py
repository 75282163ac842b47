"""Skeleton -> object, when the memory leaves are there: composites first, then the pickle stream, then the tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from ..errors import DecodeError, TrustError
from . import classes, codes, instances, numpy_values, opaque, registry, runs, skeleton, values
from .codes import Mark

_LEAVES: dict[int, Callable[[bytes], Any]] = {
    **values.LEAVES,
    codes.NUMPY_SCALAR: numpy_values.scalar_from,
    codes.NUMPY_DTYPE: numpy_values.dtype_from,
}
_LISTS: dict[int, Callable[[list[Any]], Any]] = {
    **values.LISTS,
    codes.NUMPY_RECORD: numpy_values.record_from,
    codes.NUMPY_RECORD_DTYPE: numpy_values.record_dtype_from,
    codes.NAMED: runs.named,
}
_MARKS = {code: Mark(rebuild) for code, rebuild in _LISTS.items()}


class Builder:
    """Builds the objects of one message.

    Args:
        parsed: the skeleton.
        entries: its class table, resolved.
        restricted: nothing may run that a class of this process defines.
        memory: the memory leaves, by index.
    """

    def __init__(
        self, parsed: skeleton.Parsed, entries: Sequence[instances.Resolved], restricted: bool, memory: list[Any]
    ) -> None:
        self._parsed = parsed
        self._memory = memory
        # How many leaves the runs may still name: a short message must not ask for lists without end.
        self._runs_left = len(memory)
        self._entries = [entry.value for entry in entries] if entries else []
        self._marks = _RESTRICTED_MARKS if restricted else _MARKS
        self._kinds: frozenset[type] = frozenset()
        self._check: _KeyCheck | None = None
        if restricted and entries:
            self._kinds = frozenset(entry.cls for entry in entries)
            check = _KeyCheck(self._kinds)
            if check:
                self._check = check
                self._marks = _guarded_marks(check)
        self._open_marks = 0
        self._in_tree = False
        self.composites: list[Any] = []
        self.opaque: list[Any] = []
        self.streamed: dict[int, Any] = {}
        self.shared: list[Any] = []

    def build(self) -> Any:
        parsed = self._parsed
        if parsed.only_memory:
            self._in_tree = True
            return self.unpack(parsed.tree)
        if parsed.names:
            self.unpack(parsed.composites)
            if len(self.composites) != len(parsed.names):
                raise DecodeError("the message does not define all of its composites")
        if parsed.stream is not None:
            stream = parsed.stream
            buffers = [self._memory[index] for index in stream.buffers]
            stored = self._memory[stream.at]
            opaque.load(stored, buffers, self._out_of_band, stream.leaves, self.opaque, self.streamed)
        self.restart()
        tree = self.unpack(parsed.tree)
        if not parsed.definitions:
            return tree
        if type(tree) is not list or not len(tree) - 1 == len(self.shared) == parsed.definitions:
            raise DecodeError("the message does not define all of its shared parts")
        return tree[-1]

    def unpack(self, blob: memoryview) -> Any:
        obj = skeleton.unpack(blob, self.leaf, self.array, None if self._check is None else self.pairs)
        if self._open_marks:
            raise DecodeError("a mark of the skeleton is not the first item of an array")
        return obj

    def restart(self) -> None:
        """Be ready for the tree, whatever has been built of it so far."""
        self._open_marks = 0
        self._in_tree = True
        self._runs_left = len(self._memory)
        self.shared.clear()

    # -- hooks of msgpack --------------------------------------------------------------------------------------------

    def leaf(self, code: int, data: bytes) -> Any:
        if code == codes.MEMORY:
            return self._memory[int.from_bytes(data, "little")]
        mark = self._marks.get(code)
        if mark is not None:
            self._open_marks += 1
            return mark
        make = _LEAVES.get(code)
        return self._reference(code, data) if make is None else make(data)

    def _run(self, data: bytes) -> list[Any]:
        run = self._memory[runs.entries(data, len(self._memory))]
        self._runs_left -= len(run)
        if self._runs_left < 0:
            raise ValueError("the runs name more tensors than there are")
        return run

    def _reference(self, code: int, data: bytes) -> Any:
        if code == codes.RUN:
            return self._run(data)
        index = int.from_bytes(data, "little")
        if code == codes.INSTANCE:
            entry = self._entries[index]
            if type(entry) is not Mark:
                raise ValueError("an instance of a member of an enum")
            self._open_marks += 1
            return entry
        if code == codes.DEFINITION:
            self._open_marks += 1
            return Mark(self._define_shared if self._in_tree else self._define_composite)
        if code == codes.MEMBER:
            entry = self._entries[index]
            if type(entry) is Mark:
                raise ValueError("a class where a member of an enum should be")
            return entry
        if code == codes.COMPOSITE:
            return self.composites[index]
        if code == codes.OPAQUE:
            return self.opaque[index]
        if code == codes.SHARED:
            return self.shared[index]
        buffer = self._memory[index]
        if not isinstance(buffer, (bytes, bytearray, memoryview)):
            raise ValueError("a tensor where bytes should be")
        if code == codes.BIG_BYTES:
            return bytes(buffer)
        if code == codes.BIG_BYTEARRAY:
            return bytearray(buffer)
        if code == codes.BIG_TEXT:
            return str(buffer, "utf-8", "surrogatepass")
        raise ValueError(f"unknown extension code {code}")

    def array(self, items: list[Any]) -> Any:
        if items:
            mark = items[0]
            if type(mark) is Mark:
                self._open_marks -= 1
                return mark.rebuild(items)
        return items

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return dict(pairs) if self._check is None else self._check.pairs(pairs)

    def _define_composite(self, items: list[Any]) -> None:
        name = self._parsed.names[len(self.composites)]
        entry = registry.named(name)
        if entry is None:
            raise DecodeError(f"no composite named {name!r} is registered here")
        if self._kinds and not entry.instances:
            _refuse_instances(items, self._kinds, name)
        self.composites.append(entry.rebuild(items[1:]))

    def _define_shared(self, items: list[Any]) -> None:
        _, part = items
        self.shared.append(part)

    def _out_of_band(self, pid: Any) -> Any:
        return self.composites[pid // 2] if pid % 2 else self._memory[pid // 2]


# -- restricted trust --------------------------------------------------------------------------------------------------


def _runs_code(kind: type) -> bool:
    """Whether a class has its own idea of what equal or a hash is, beyond what Python and dataclasses make."""
    for method in (kind.__hash__, kind.__eq__):
        code = getattr(method, "__code__", None)
        if code is not None and method is not Enum.__hash__ and code.co_filename != "<string>":
            return True
    return False


class _KeyCheck:
    """Refuses keys and elements of sets that would be hashed or compared by code of a class of this process."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._refused = frozenset(kind for kind in kinds if _runs_code(kind))

    def __bool__(self) -> bool:
        return bool(self._refused)

    def __call__(self, key: Any) -> None:
        kind = type(key)
        if kind in self._refused:
            raise TrustError(
                f"{kind.__module__}.{kind.__qualname__} as a key would run its own __hash__ or __eq__",
                hint="use plain values as keys, or cluster trust",
            )
        if issubclass(kind, (tuple, frozenset)):
            for item in key:
                self(item)
        elif hasattr(kind, "__dataclass_fields__"):
            layout = classes.layout(kind)
            attributes = None if layout is None else layout.attributes(key)
            for item in () if attributes is None else attributes[1]:
                self(item)

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        for key, _ in pairs:
            self(key)
        return dict(pairs)

    def guarding(self, step: int, start: int, rebuild: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def guarded(items: list[Any]) -> Any:
            for key in items[start::step]:
                self(key)
            return rebuild(items)

        return guarded


def _refuse_instances(part: Any, kinds: frozenset[type], name: str) -> None:
    """What builds a composite may ask its parts for a length, an index, an order: no class shall answer with code."""
    if type(part) in kinds:
        raise TrustError(f"an instance of {type(part).__qualname__} is part of a composite ({name})")
    if isinstance(part, dict):
        part = [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset, deque)):
        for item in part:
            _refuse_instances(item, kinds, name)


# Of the lists that hash: how far apart their keys are, and where the first is.
_KEYS = {
    codes.SET: (1, 1),
    codes.FROZENSET: (1, 1),
    codes.DICT: (2, 1),
    codes.ORDERED_DICT: (2, 1),
    codes.DEFAULT_DICT: (2, 2),
}


def _builtin_factory(items: list[Any]) -> Any:
    if items[1] is not None and type(items[1]) is not type:
        raise TrustError("a defaultdict of restricted trust has None or a builtin type as its factory")
    return _LISTS[codes.DEFAULT_DICT](items)


_RESTRICTED_LISTS = {**_LISTS, codes.DEFAULT_DICT: _builtin_factory}
_RESTRICTED_MARKS = {code: Mark(rebuild) for code, rebuild in _RESTRICTED_LISTS.items()}


def _guarded_marks(check: _KeyCheck) -> dict[int, Mark]:
    guarded = {code: Mark(check.guarding(*_KEYS[code], _RESTRICTED_LISTS[code])) for code in _KEYS}
    return {**_RESTRICTED_MARKS, **guarded}
