"""Skeleton -> object, when the memory leaves are there: composites first, then the pickle stream, then the tree."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DecodeError, LimitError, TrustError
from . import codes, instances, numpy_values, opaque, registry, runs, skeleton, values
from .allowance import current
from .codes import Mark
from .keys import Keys, builtin_factory, rebuilders

_LEAVES: dict[int, Callable[[bytes], Any]] = {
    **values.LEAVES,
    codes.NUMPY_SCALAR: numpy_values.scalar_from,
    codes.NUMPY_DTYPE: numpy_values.dtype_from,
}
_RESTRICTED_LEAVES = {**_LEAVES, codes.ZONE: values.zone_of_the_system}
_LISTS: dict[int, Callable[[list[Any]], Any]] = {
    **values.LISTS,
    codes.NUMPY_RECORD: numpy_values.record_from,
    codes.NUMPY_RECORD_DTYPE: numpy_values.record_dtype_from,
    codes.NAMED: runs.named,
}
_MARKS = {code: Mark(rebuild) for code, rebuild in _LISTS.items()}

# CPython frees these by a recursion that nothing bounds: deeply nested and dropped, they would end the process.
_FRAGILE = frozenset((slice, deque, defaultdict))
_MOST_FRAGILE = 500


class Builder:
    """Builds the objects of one message.

    Args:
        parsed: the skeleton.
        entries: its class table, resolved.
        restricted: nothing may run that a class of this process defines.
        memory: the memory leaves, by index.
        max_bytes: the most that may be copied or looked at beyond them.
    """

    def __init__(
        self,
        parsed: skeleton.Parsed,
        entries: Sequence[instances.Resolved],
        restricted: bool,
        memory: list[Any],
        max_bytes: int,
    ) -> None:
        self._parsed = parsed
        self._memory = memory
        # How many leaves the runs may still name: a short message must not ask for lists without end.
        self._runs_left = len(memory)
        self._entries = [entry.value for entry in entries] if entries else []
        self._marks = _RESTRICTED_MARKS if restricted else _MARKS
        self._simple = _RESTRICTED_LEAVES if restricted else _LEAVES
        self._kinds: frozenset[type] = frozenset()
        self._keys: Keys | None = None
        if restricted:
            if entries:
                self._kinds = frozenset(entry.cls for entry in entries)
            keys = Keys(self._kinds)
            if keys.refused or parsed.definitions or skeleton.is_long(parsed):
                self._keys = keys
                self._marks = _guarded_marks(keys)
        self._max_bytes = self._left = max_bytes
        self._converted: dict[tuple[int, int], Any] | None = None
        self._nested: dict[int, int] | None = None
        self._open_marks = 0
        self._in_tree = False
        self.composites: list[Any] = []
        self.opaque: list[Any] = []
        self.streamed: dict[int, Any] = {}
        self.shared: list[Any] = []

    def build(self) -> Any:
        token = current.set(self)
        try:
            return self._build()
        finally:
            current.reset(token)

    def spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise LimitError("rebuilding this message would copy or look at more than max_bytes")

    def _build(self) -> Any:
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
        if self._keys is None:
            obj = skeleton.unpack(blob, self.leaf, self.array)
        else:
            obj = skeleton.unpack_watched(blob, self.pairs, self.leaf, self.array, again=self._forget)
        if self._open_marks:
            raise DecodeError("a mark of the skeleton is not the first item of an array")
        return obj

    def _forget(self) -> None:
        """Be ready for the same piece once more."""
        self._open_marks = 0
        self._runs_left = len(self._memory)
        self._left = self._max_bytes
        (self.shared if self._in_tree else self.composites).clear()

    def restart(self) -> None:
        """Be ready for the tree, whatever has been built of it so far."""
        self._in_tree = True
        self._forget()

    # -- hooks of msgpack --------------------------------------------------------------------------------------------

    def leaf(self, code: int, data: bytes) -> Any:
        if code == codes.MEMORY:
            return self._memory[int.from_bytes(data, "little")]
        mark = self._marks.get(code)
        if mark is not None:
            self._open_marks += 1
            return mark
        make = self._simple.get(code)
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
        if code == codes.BIG_BYTEARRAY:
            self.spend(len(buffer))
            return bytearray(buffer)
        if code == codes.BIG_BYTES or code == codes.BIG_TEXT:
            if self._converted is None:
                self._converted = {}
            found = self._converted.get((code, index))
            if found is None:
                found = bytes(buffer) if code == codes.BIG_BYTES else str(buffer, "utf-8", "surrogatepass")
                self._converted[code, index] = found
            return found
        raise ValueError(f"unknown extension code {code}")

    @property
    def array(self) -> Callable[[list[Any]], Any]:
        """What becomes of an array, once its items have become what they are."""
        return self._nested_array if self._parsed.definitions else self._array

    def _nested_array(self, items: list[Any]) -> Any:
        """The same where definitions let things be nested more deeply than msgpack does."""
        value = self._array(items)
        if type(value) in _FRAGILE:
            if self._nested is None:
                self._nested = {}
            below = [self._nested.get(id(item), 0) for item in items if type(item) in _FRAGILE]
            depth = self._nested[id(value)] = 1 + max(below, default=0)
            if depth > _MOST_FRAGILE:
                raise ValueError(f"more than {_MOST_FRAGILE} slices, deques or defaultdicts directly in one another")
        return value

    def _array(self, items: list[Any]) -> Any:
        if items:
            mark = items[0]
            if type(mark) is Mark:
                self._open_marks -= 1
                return mark.rebuild(items)
        return items

    def pairs(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return dict(pairs) if self._keys is None else self._keys.pairs(pairs)

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


def _refuse_instances(part: Any, kinds: frozenset[type], name: str) -> None:
    """What builds a composite may ask its parts for a length, an index, an order: no class shall answer with code."""
    if type(part) in kinds:
        raise TrustError(f"an instance of {type(part).__qualname__} is part of a composite ({name})")
    if isinstance(part, dict):
        part = [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset, deque)):
        for item in part:
            _refuse_instances(item, kinds, name)


def _builtin_factory(items: list[Any]) -> Any:
    builtin_factory(items)
    return _LISTS[codes.DEFAULT_DICT](items)


_RESTRICTED_LISTS = {**_LISTS, codes.DEFAULT_DICT: _builtin_factory}
_RESTRICTED_MARKS = {code: Mark(rebuild) for code, rebuild in _RESTRICTED_LISTS.items()}


def _guarded_marks(keys: Keys) -> dict[int, Mark]:
    return {**_RESTRICTED_MARKS, **{code: Mark(rebuild) for code, rebuild in rebuilders(keys).items()}}
