"""Everything that no other file knows: one cloudpickle stream a message, with tensors and arrays kept out of it.

Leaves are pickled one after the other by one pickler, so an object of a user's class that occurs in several leaves
arrives as one object, and both ends know which leaf fails. What a module of this process holds under its own name
travels as a reference, ``__main__`` included: the receiver's class is then the class of what arrives.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cloudpickle
import torch

from ..errors import DecodeError, EncodeError
from . import byname, compiled, plain, registry, torchops
from .classes import dict_of
from .levels import Trouble
from .parts import MEMORYVIEW_HINT
from .path import describe
from .scan import Scan

# Unpickling an instance of it ends the process.
_BARE: Any = torch._C.ScriptModule

# Never out of band, and most of what a pickler meets.
_COMMON = frozenset((str, int, float, bool, type(None), tuple, list, dict, bytes, set, type, types.FunctionType))

# What cloudpickle would make something else of.
_CHANGED: dict[type, str] = {
    memoryview: MEMORYVIEW_HINT,
    io.TextIOWrapper: "send its name or its content",
}


def instead_of(obj: object) -> str:
    """What to send in the place of something that cannot be pickled."""
    if any("__next__" in dict_of(base) for base in type.mro(type(obj))):  # nothing of the object may run
        return "send a list of what it gives"
    return "leave it out, or let __getstate__ of the class around it leave it out; each rank makes its own"


class _OutOfBand(pickle.Pickler):
    """Keeps tensors and arrays, and what is registered, out of the stream; all else is Python's own pickle."""

    def __init__(self, file: io.BytesIO, scan: Scan, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._scan = scan
        self._reduced: set[int] = set()
        self._reducers: Any = getattr(self, "dispatch_table", copyreg.dispatch_table)

    def persistent_id(self, obj: Any) -> int | None:
        return None if type(obj) in _COMMON else self._scan.out_of_band(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType or issubclass(type(obj), type):
            named = byname.reduce(obj)
            return NotImplemented if named is None else named
        if issubclass(type(obj), torchops.KINDS):
            return torchops.reduce(obj)
        parts = self._scan.in_stream(obj)
        if parts is None:
            return NotImplemented if type(obj) in self._reducers else byname.reduce_itself(obj)
        if id(obj) in self._reduced:  # a second time, so it is not finished: it would be built from half of itself
            raise EncodeError(f"{describe(obj)} contains itself")
        self._reduced.add(id(obj))
        number = self._scan.history.add_streamed(obj, parts[1])
        return _rebuild_composite, (parts if number is None else (*parts, number))


class _Pickler(_OutOfBand, cloudpickle.Pickler):  # type: ignore[misc]
    """Classes and functions that have no name of their own go by value, as cloudpickle does it."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType or issubclass(kind, type):
            named = byname.reduce(obj)
            if named is not None:
                return named
            if kind is types.FunctionType:
                compiled.refuse_function(obj)
            return _with_qualname(obj, cloudpickle.Pickler.reducer_override(self, obj))
        if kind is types.ModuleType:
            return byname.reduce_module(obj) or cloudpickle.Pickler.reducer_override(self, obj)
        hint = _CHANGED.get(kind)
        if hint is not None and obj not in (sys.stdout, sys.stderr):
            raise EncodeError(f"{describe(obj)} cannot be sent", hint=hint)
        reduced = super().reducer_override(obj)
        return cloudpickle.Pickler.reducer_override(self, obj) if reduced is NotImplemented else reduced


def _with_qualname(obj: Any, reduced: Any) -> Any:
    """A class by value keeps its qualified name, which cloudpickle makes anew from the plain name."""
    if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], tuple):
        reduced[2][0].setdefault("__qualname__", obj.__qualname__)
    return reduced


class Stream:
    """The pickle of all leaves of a scan, which may get more of them in the meantime."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._pickled = 0
        self._file = io.BytesIO()
        self._buffers: list[int] = []
        self._pickler: _OutOfBand | None = None

    def dump(self) -> None:
        """Pickle the leaves that are not pickled yet.

        Raises:
            Trouble: one of them cannot be pickled.
        """
        leaves = self._scan.leaves
        while self._pickled < len(leaves):
            if self._pickler is None:
                kind = _OutOfBand if plain.is_on() else _Pickler
                self._pickler = kind(self._file, self._scan, self._add_buffer)
            leaf = leaves[self._pickled]
            try:
                self._pickler.dump(leaf)
            except Exception as error:
                raise Trouble(leaf, pickled=True) from error
            self._pickled += 1

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self._buffers.append(self._scan.memory.add_bytes(buffer.raw()))

    def finish(self) -> list[Any] | None:
        """The entry of the tables; None if there are no leaves."""
        if self._pickler is None:
            return None
        self._pickler = None  # it refers back to this stream
        return [self._scan.memory.add_bytes(self._file.getbuffer()), self._pickled, self._buffers]


def failure(obj: Any, forbid_grad: bool = False) -> Exception | None:
    """The exception that pickling an object by itself raises, if any."""
    scan = Scan("cluster", sys.maxsize, forbid_grad=forbid_grad)
    scan.leaves.append(obj)
    try:
        Stream(scan).dump()
    except Trouble as trouble:
        cause = trouble.__cause__
        assert isinstance(cause, Exception)
        return cause
    return None


def _rebuild_composite(name: str, parts: list[Any], number: int | None = None) -> Any:
    entry = registry.named(name)
    if entry is None:
        raise DecodeError(f"no composite named {name!r} is registered here")
    return entry.rebuild(parts)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        buffers: Sequence[Any],
        out_of_band: Callable[[int], Any],
        numbered: dict[int, Any],
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._out_of_band = out_of_band
        self._numbered = numbered

    def persistent_load(self, pid: Any) -> Any:
        return self._out_of_band(pid)

    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_composite" and module == __name__:
            return partial(_rebuild_numbered, self._numbered)
        sys.audit("pickle.find_class", module, name)
        found = byname.find(module, name)
        if found is _BARE:
            raise DecodeError("the message holds a bare script object, which would abort this process")
        return found


def _rebuild_numbered(numbered: dict[int, Any], name: str, parts: list[Any], number: int | None = None) -> Any:
    obj = _rebuild_composite(name, parts)
    if number is not None:
        numbered[number] = obj
    return obj


def load(
    stream: Any,
    buffers: Sequence[Any],
    out_of_band: Callable[[int], Any],
    count: int,
    into: list[Any],
    numbered: dict[int, Any],
) -> None:
    """Unpickle ``count`` leaves, appending each. Only cluster trust may come here.

    Composites that have a number go into ``numbered`` as well.

    An exception of a leaf passes through; ``len(into)`` is then its number.
    """
    unpickler = _Unpickler(io.BytesIO(stream), buffers, out_of_band, numbered)
    for _ in range(count):
        into.append(unpickler.load())
