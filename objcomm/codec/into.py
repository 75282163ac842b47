"""Receiving into an object that exists: its tensors and arrays are filled in place.

The received structure is built twice: before anything is transferred with slots in place of tensors, to be compared
with the object, and after the transfer with the object's own tensors in it. Nothing of the object is touched unless
all of it matches.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DecodeError
from . import arrays, instances, skeleton, statedict, tensors
from .address import bytes_at, words
from .form import READ_ONLY, Form
from .memory_table import Table
from .ordinary import Ordinary
from .overlap import Span, sharing_of
from .path import ROOT, children, describe, show_received
from .sketch import Other, Slot, sketch

_HINT = "pass an object of the same structure, or receive without into"

# Composites whose first part is the object itself, without what is put on: that is what is compared.
_DRESSES = ("tensor.attributes", "tensor.parameter", statedict.NAME)


@dataclass(frozen=True)
class _Match:
    """A tensor or array of the object, and what will arrive for it."""

    target: Any
    form: Form  # of the target
    low: int  # address of its lowest byte
    path: str


class Filling:
    """What of an object is filled by which leaf.

    Args:
        parsed, entries, restricted: as of ``sketch``.
        table: of the memory of the message; None if it has none.
        into: the object.

    Raises:
        DecodeError: the object does not have the structure of what is received.
    """

    def __init__(
        self,
        parsed: skeleton.Parsed,
        entries: Sequence[instances.Resolved],
        restricted: bool,
        table: Table | None,
        into: object,
        max_bytes: int,
    ) -> None:
        self._table = table
        self._matches: dict[int, _Match] = {}
        self._leaf_of: dict[int, int] = {}
        self._compared: set[tuple[int, int]] = set()
        self._straight: set[int] = set()
        self._kept: Any = None
        received = sketch(parsed, entries, restricted, table, max_bytes)
        self._kept = received  # ids are only good while it lives
        self._compare(received, into, ROOT)
        self._check_sharing()

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compare(self, received: Any, into: Any, path: str) -> None:
        kind = type(received)
        if kind is Slot:
            self._compare_slot(received, into, path)
            return
        if kind is Other and received.name in _DRESSES:
            self._compare(received.parts[0], into, path)
            return
        if kind is Other and received.name.startswith("tensor."):
            what = received.name.removeprefix("tensor.")
            raise _mismatch(f"a tensor of the kind {what!r} arrives, which cannot be filled in place", path)
        if kind is Other or not _holds(kind):
            if _is_memory(into) or _holds(type(into)):
                raise _mismatch(f"into has {describe(into)}, received is {_name(received)}", path)
            return
        if type(into) is not kind:
            raise _mismatch(f"into has {describe(into)}, received is {describe(received)}", path)
        if (id(received), id(into)) not in self._compared:
            self._compared.add((id(received), id(into)))
            self._compare_parts(received, into, path)

    def _compare_parts(self, received: Any, into: Any, path: str) -> None:
        if isinstance(received, dict):
            missing = [key for key in received if key not in into] + [key for key in into if key not in received]
            if missing:
                where = "into" if missing[0] in received else "what is received"
                raise _mismatch(f"{where} has no key {show_received(missing[0])}", path)
            for key, value in received.items():
                self._compare(value, into[key], f"{path}[{show_received(key)}]")
            return
        if isinstance(received, (set, frozenset)):
            if any(type(child) in (Slot, Other) for child in received):
                raise _mismatch("the tensors in a set have no order, so they cannot be filled in place", path)
            return
        targets = dict(children(into))
        parts = list(children(received))
        if len(parts) != len(targets):
            raise _mismatch(f"into has {len(targets)} items, received are {len(parts)}", path)
        for label, value in parts:
            if label not in targets:
                raise _mismatch(f"into has no {label}", path)
            self._compare(value, targets[label], path + label)

    def _compare_slot(self, slot: Slot, into: Any, path: str) -> None:
        earlier = self._matches.get(slot.leaf)
        if earlier is not None:
            if earlier.target is not into:
                raise _mismatch(f"received is the same object as at {earlier.path}, into has two", path)
            return
        if self._leaf_of.setdefault(id(into), slot.leaf) != slot.leaf:
            other = self._matches[self._leaf_of[id(into)]].path
            raise _mismatch(f"into has the same object as at {other}, received are two", path)
        match = _match_tensor(slot, into, path) if slot.form.is_tensor else _match_array(slot, into, path)
        self._matches[slot.leaf] = match

    def _check_sharing(self) -> None:
        """What fills one tensor must not fill another as well, except where the received ones share memory alike."""
        if self._table is None:
            return
        places = {
            leaf: (number, offset)
            for number, cluster in enumerate(self._table.clusters)
            for leaf, offset in cluster.members
        }
        domains: dict[Hashable, list[Span]] = {}
        for leaf, match in self._matches.items():
            if match.form.hull:
                domain = tensors.domain_of(match.target) if isinstance(match.target, torch.Tensor) else None
                domains.setdefault(domain, []).append(Span(leaf, match.low, match.form))
        for spans in domains.values():
            for group in sharing_of(spans):
                self._check_group(group, places)

    def _check_group(self, group: list[Span], places: dict[int, tuple[int, int]]) -> None:
        first = group[0]
        for span in group[1:]:
            one, other = places.get(first.leaf), places.get(span.leaf)
            alike = one is not None and other is not None and one[0] == other[0]
            if not alike or not all(_same_steps(self._form(each.leaf), each.form) for each in (first, span)):
                path, at = self._matches[span.leaf].path, self._matches[first.leaf].path
                raise _mismatch(f"it shares memory with {at} in into, and not in that way in what is received", path)
            assert one is not None and other is not None
            if other[1] - one[1] != span.low - first.low:
                path, at = self._matches[span.leaf].path, self._matches[first.leaf].path
                raise _mismatch(f"it shares memory with {at} in into at another distance than received", path)

    def _form(self, leaf: int) -> Form:
        assert self._table is not None
        return self._table.forms[leaf]

    # -- filling -----------------------------------------------------------------------------------------------------

    def targets(self, segments: Sequence[tuple[int, bool]]) -> list[torch.Tensor | None]:
        """For each segment the memory of the one tensor or array that is in it, if it lies there as it travels."""
        found: list[torch.Tensor | None] = [None] * len(segments)
        if self._table is None:
            return found
        with Ordinary():
            for number, (contents, (_, accelerator)) in enumerate(zip(self._table.segments, segments, strict=True)):
                match = self._matches.get(contents) if isinstance(contents, int) else None
                if match is None or not isinstance(contents, int):
                    continue
                form = match.form
                if form.hull == form.shown and _same_steps(self._form(contents), form):
                    memory = _memory_of(match)
                    if tensors.on_accelerator(memory.device) == accelerator:
                        found[number] = memory
                        self._straight.add(contents)
        return found

    def fill(self, leaves: list[Any]) -> list[Any]:
        """The leaves with the object's tensors and arrays in place of the received ones, whose values they take."""
        with Ordinary():
            for leaf, match in self._matches.items():
                if leaf not in self._straight:
                    _copy(match.target, leaves[leaf])
                elif isinstance(match.target, torch.Tensor) and not match.target.is_inference():
                    torch.autograd.graph.increment_version(match.target)
        return [self._matches[number].target if number in self._matches else leaf for number, leaf in enumerate(leaves)]


def _mismatch(text: str, path: str) -> DecodeError:
    return DecodeError(f"into does not match what is received: {text}", path=path, hint=_HINT)


def _name(received: Any) -> str:
    return f"of the kind {received.name!r}" if type(received) is Other else describe(received)


def _is_memory(obj: Any) -> bool:
    np = sys.modules.get("numpy")
    return isinstance(obj, torch.Tensor) or (np is not None and isinstance(obj, np.ndarray))


def _holds(kind: type) -> bool:
    """Whether what is inside of objects of a type is compared."""
    return (
        issubclass(kind, (dict, list, tuple, set, frozenset))
        or hasattr(kind, "__dataclass_fields__")
        or (kind.__module__ == "collections")
    )


def _match_tensor(slot: Slot, into: Any, path: str) -> _Match:
    if not isinstance(into, torch.Tensor):
        raise _mismatch(f"into has {describe(into)}, received is a tensor of {slot}", path)
    if into.dtype is not slot.form.dtype or list(into.shape) != list(slot.form.shape):
        raise _mismatch(f"into has {into.dtype} of shape {list(into.shape)}, received is {slot}", path)
    with Ordinary():
        bare = into.detach() if into.__dict__ else into
        if not tensors.is_plain(bare):
            raise _mismatch(f"into has {describe(into)} that is more than plain memory, received is {slot}", path)
        form = tensors.form_of(bare)
        storage = into.untyped_storage()
        if form.hull and storage.nbytes() < into.storage_offset() * form.itemsize + form.hull:
            raise _mismatch("the tensor in into has no memory: its storage was freed or shrunk", path)
    _check_places(form, path)
    return _Match(into, form, into.data_ptr(), path)


def _match_array(slot: Slot, into: Any, path: str) -> _Match:
    import numpy as np

    if type(into) is not np.ndarray:
        raise _mismatch(f"into has {describe(into)}, received is an array of {slot}", path)
    if into.dtype != slot.form.dtype or list(into.shape) != list(slot.form.shape):
        raise _mismatch(f"into has {into.dtype} of shape {list(into.shape)}, received is {slot}", path)
    form = arrays.form_of(into)
    if form.flags & READ_ONLY:
        raise _mismatch("the array in into is read-only", path)
    _check_places(form, path)
    return _Match(into, form, arrays.address_of(into) - form.lead, path)


def _check_places(form: Form, path: str) -> None:
    repeats = any(extent > 1 and not stride for extent, stride in zip(form.shape, form.strides, strict=True))
    if form.hull and (repeats or not form.apart):
        raise _mismatch("elements of the tensor or array in into share memory", path)


def _same_steps(one: Form, other: Form) -> bool:
    """Whether the elements follow each other in memory in the same way."""
    return [step for step, extent in zip(one.strides, one.shape, strict=True) if extent > 1] == [
        step for step, extent in zip(other.strides, other.shape, strict=True) if extent > 1
    ]


def _memory_of(match: _Match) -> torch.Tensor:
    if isinstance(match.target, torch.Tensor):
        storage = match.target.untyped_storage()
        return words(storage, match.low - storage.data_ptr(), (), match.form.hull, 1)
    return bytes_at(match.low, match.form.hull)


def _copy(target: Any, received: Any) -> None:
    if not isinstance(target, torch.Tensor):
        target[...] = received
    elif target.is_inference():
        tensors.memory_of(target).copy_(received)
    else:
        target.copy_(received)
