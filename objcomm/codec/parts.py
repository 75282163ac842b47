"""One object -> its part: what msgpack packs in place of an object that it has no type for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from msgpack import ExtType, Timestamp

from ..config import Trust
from ..errors import EncodeError, TrustError
from . import arrays, classes, codes, generated, history, numpy_values, plain, registry, tensors, values
from .codes import Part, ext, indexed
from .instances import ClassTable
from .levels import Entangled, Trouble
from .memory import Memory, MemoryWriter
from .path import describe

Handler = Callable[[Any], "Part | None"]

# msgpack packs these as something else without a word, whatever strict_types says.
_MISTAKEN = frozenset((bytearray, memoryview, ExtType, Timestamp))

CLUSTER_HINT = "use cluster trust on both ranks"
GRAD_HINT = "detach it if no gradient is needed; objcomm.autograd sends objects whose gradients come back"
MEMORYVIEW_HINT = "send bytes(view), or an array or tensor over its memory"


class NeedsPickle(Exception):
    """Part of a composite can only be pickled, so the composite has to go into the stream as well."""


class Parts:
    """The parts of one message, and what they refer to.

    Attributes:
        mistaken: some container holds what msgpack would mistake for something else, so the tree has to be rewritten.
        leaves: what the pickle stream holds.
        composites: name and parts of each, in front of those that it is a part of.
        history: those of them that require grad.
        dataclasses: those that occur. Their instances keep their identity.
        repeats: something that may hold such an instance occurs more than once.
    """

    def __init__(self, trust: Trust, threshold: int, forbid_grad: bool) -> None:
        self.restricted = trust == "restricted"
        self._pickles_dataclasses = plain.is_on() and not self.restricted
        self.forbid_grad = forbid_grad
        self.threshold = threshold
        self.classes = ClassTable(versions=not self.restricted)
        self.mistaken = False
        self.leaves: list[Any] = []
        self.composites: list[tuple[str, list[Any]]] = []
        self.history = history.Sources()
        self.dataclasses: set[type] = set()
        self.repeats = False
        self._memory: MemoryWriter | None = None
        self._parts: dict[int, Part] = {}
        self._alive: list[Any] = []  # no id that is noted anywhere here is used again
        self._flattened: dict[int, tuple[str, list[Any]]] = {}
        self._in_stream: set[int] = set()
        self._in_composites: set[int] = set()
        self._open: set[int] = set()
        self._no_pickle = False
        self._gatherings: dict[Any, registry.Gathering] = {}
        self._inert: dict[type, bool] = {}

    def walk(self, level: list[Any]) -> None:
        """Make the parts of all that is reachable from these objects."""
        raise NotImplementedError

    @property
    def memory(self) -> MemoryWriter:
        if self._memory is None:
            self._memory = MemoryWriter(self.threshold)
        return self._memory

    def finish(self) -> Memory | None:
        """The memory of the message, if it has any."""
        return None if self._memory is None else self._memory.finish()

    def remember(self, obj: Any, part: Part) -> None:
        self._parts[id(obj)] = part
        self._alive.append(obj)

    def known(self, obj: Any) -> Part | None:
        """The part of an object that the walk has come to."""
        return self._parts.get(id(obj))

    def handler(self, kind: type) -> Handler:
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
        pickled = self._pickles_dataclasses and layout is not None and layout.kind == "dataclass"
        if layout is not None and not pickled and not generated.owns_named(kind):
            take = self.classes.taker(layout)
            if layout.kind == "dataclass":
                self.dataclasses.add(kind)
            return (lambda obj: self._registered(obj) or take(obj)) if registry.may_match(kind) else take
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
        return self.other if registry.may_match(kind) else self._pickled

    def other(self, obj: Any) -> Part:
        """A composite, or else a leaf of the pickle stream."""
        return self._registered(obj) or self._pickled(obj)

    def _registered(self, obj: Any) -> Part | None:
        entry = registry.find(obj)
        return None if entry is None else self._composite(obj, entry)

    def _pickled(self, obj: Any) -> Part:
        if self.restricted:
            raise TrustError(
                f"{describe(obj)} would have to be pickled, and trust is restricted",
                hint=f"send it as plain values, a dataclass or tensors, or {CLUSTER_HINT}",
            )
        if self._no_pickle:
            raise NeedsPickle
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
        if self.forbid_grad and obj.requires_grad:
            raise EncodeError(
                "a tensor that requires grad would arrive without its history, and its gradient would be lost",
                hint=GRAD_HINT,
            )
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

    def _composite(self, obj: Any, entry: registry.Entry) -> Part:
        if entry.code and self.restricted:
            raise TrustError(f"{describe(obj)} holds code, and trust is restricted", hint=CLUSTER_HINT)
        key = id(obj)
        if key in self._open:
            raise NeedsPickle
        if key not in self._flattened:
            flatten = entry.flatten if entry.gather is None else self._gathering(entry.gather).add
            self._flattened[key] = (entry.name, list(flatten(obj)))
            self._alive.append(obj)
        name, parts = self._flattened[key]
        instance = _instance_in(parts) if self.restricted and not entry.instances else None
        if instance is not None:
            what = f"{describe(obj)} with {describe(instance)} as one of its parts"
            raise TrustError(f"{what} is only sent in cluster trust", hint=CLUSTER_HINT)
        outer, self._no_pickle = self._no_pickle, True
        self._open.add(key)
        try:
            self.walk(parts)
        except (NeedsPickle, Entangled):
            self._no_pickle = outer
            self._in_stream.add(key)
            return self._pickled(obj)
        finally:
            self._no_pickle = outer
            self._open.discard(key)
        self.history.add_composite(len(self.composites), obj, parts)
        self.composites.append((name, parts))
        return indexed(codes.COMPOSITE, len(self.composites) - 1)

    def _gathering(self, gather: Callable[[], registry.Gathering]) -> registry.Gathering:
        """What all objects of one kind travel in. It is a composite itself, in front of theirs; its parts come last."""
        gathering = self._gatherings.get(gather)
        if gathering is None:
            gathering = self._gatherings[gather] = gather()
            self.composites.append((gathering.name, gathering.parts))
            self.remember(gathering, indexed(codes.COMPOSITE, len(self.composites) - 1))
        return gathering

    def gather(self) -> None:
        """Finish what objects travel in together, when all of the message has been seen."""
        for gathering in self._gatherings.values():
            gathering.finish(self.memory, self.forbid_grad)
            self._no_pickle = True
            self.walk(list(gathering.parts))
            self._no_pickle = False

    # -- inside the pickle stream ------------------------------------------------------------------------------------

    def out_of_band(self, obj: Any) -> int | None:
        """Twice the index of a memory leaf, or of a composite and one more; None for what the stream itself holds."""
        kind = type(obj)
        inert = self._inert.get(kind)
        if inert is None:
            known = _is_memory(kind) or kind in self.dataclasses or registry.may_match(kind)
            inert = self._inert[kind] = not known
        if inert:
            return None
        part: Any = self._parts.get(id(obj))
        if part is None and id(obj) not in self._in_stream:
            part = self._stream_part(obj)
        elif type(part) is list and kind in self.dataclasses and id(obj) not in self._in_composites:
            # It is in the tree as well. There it becomes a leaf of the stream too, and so one object at the receiver.
            self.leaves.append(obj)
            self._parts[id(obj)] = indexed(codes.OPAQUE, len(self.leaves) - 1)
        if type(part) is not ExtType or part.code not in (codes.MEMORY, codes.COMPOSITE):
            return None
        index: int = int.from_bytes(part.data, "little")
        return index * 2 + bool(part.code == codes.COMPOSITE)

    def _stream_part(self, obj: Any) -> Part | None:
        outer, self._no_pickle = self._no_pickle, True
        try:
            if _is_memory(type(obj)):
                part = self._tensor(obj) if issubclass(type(obj), torch.Tensor) else self._array(obj)
            else:
                part = self._registered(obj)
        except NeedsPickle:
            return None
        finally:
            self._no_pickle = outer
        if part is not None:
            self.remember(obj, part)
        return part

    def in_stream(self, obj: Any) -> tuple[str, list[Any]] | None:
        """Name and parts of a composite that goes into the stream."""
        return self._flattened.get(id(obj)) if id(obj) in self._in_stream else None


def _instance_in(part: Any) -> Any:
    """An instance of a class that travels by reference, or None. Rebuilding a composite might make it run code."""
    if isinstance(part, dict):
        part = [*part.keys(), *part.values()]
    elif classes.layout(type(part)) is not None:
        return part
    if isinstance(part, (list, tuple, set, frozenset)):
        return next((found for found in map(_instance_in, part) if found is not None), None)
    return None


def _is_memory(kind: type) -> bool:
    np = sys.modules.get("numpy")
    return issubclass(kind, torch.Tensor) or (np is not None and kind is np.ndarray)


def _refuse_memoryview(obj: memoryview) -> Part:
    raise EncodeError(f"{describe(obj)} cannot be sent", hint=MEMORYVIEW_HINT)
