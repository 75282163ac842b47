"""The table of a message as the receiver reads it: every number in it is checked, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import DecodeError, LimitError
from . import arrays, tensors
from .address import FEW
from .form import BYTES, Form
from .overlap import packed_places
from .placing import Buffers, Places

_MOST_AXES = 256
_LARGEST = 1 << 62
# What torch needs for a tensor, and for each of its dimensions, beside the data; and what is always allowed for them.
_LEAF_BYTES, _AXIS_BYTES = 512, 16
_LEAVES_BYTES = 64 << 20


@dataclass(frozen=True)
class Cluster:
    """Memory that several leaves look at; members are (leaf, offset of its lowest byte)."""

    extent: int
    scattered: bool
    members: tuple[tuple[int, int], ...]
    nbytes: int  # that travel


class Gathered(NamedTuple):
    """Small tensors of one dtype that lie one after the other.

    Attributes:
        sizes: of each its elements.
        plain: each has one axis, and no flags.
        all: they are all leaves of the message, in their order.
    """

    sizes: list[int]
    plain: bool
    all: bool


class Table:
    """What is in a message and where, see memory.py.

    Attributes:
        forms: of each leaf its form.
        empty: the leaves without a byte.
        clusters: numbered after the leaves.
        inline: the places in the inline area.
        segments: of each segment the buffer in it, or the places in it.
        few: of each leaf its form and its place in the inline area, if they are few, small tensors, and all there.

    Raises:
        DecodeError: it does not describe the inline area and the segments that come with it.
        LimitError: it asks for more memory than ``max_bytes``.
    """

    def __init__(self, table: Any, *, inline_bytes: int, segments: Sequence[tuple[int, bool]], max_bytes: int) -> None:
        kinds, leaves, clusters, owners = _list(table, 4)
        forms = list(map(_read_form, _list(kinds)))
        _check_numbers(leaves, len(forms))
        self.forms: list[Form] = list(map(forms.__getitem__, leaves))
        self.clusters: list[Cluster] = []
        in_cluster: set[int] = set()
        for cluster in _list(clusters):
            self.clusters.append(self._read_cluster(cluster, in_cluster))
        self._check_size(forms, inline_bytes, segments, max_bytes)
        if len(_list(owners)) != len(segments):
            raise DecodeError(f"the table describes {len(owners)} segments, the message has {len(segments)}")
        rest, self.empty = self._all_buffers(in_cluster)
        self.segments: list[int | Places] = []
        if segments:
            left = {number: (size, group) for number, size, group in zip(*rest, strict=True)}
            for owner, (nbytes, _) in zip(owners, segments, strict=True):
                self.segments.append(_read_segment(owner, nbytes, left))
            rest = Buffers.of([(buffer, *left[buffer]) for buffer in left])
        self.inline = Places(rest)
        if self.inline.nbytes != inline_bytes:
            raise DecodeError(f"the inline area has {inline_bytes} bytes, its contents {self.inline.nbytes}")
        self.few = self._few() if len(self.forms) <= FEW else []
        self._gathered: dict[int, Gathered] = {}

    def gathered(self, buffers: Sequence[int]) -> Gathered:
        """What there is to know of a group of ``inline`` or of a segment; it is found out once for all messages."""
        found = self._gathered.get(id(buffers))
        if found is None:
            forms = [self.forms[buffer] for buffer in buffers]
            sizes = [form.hull // form.itemsize for form in forms]
            plain = all(not form.flags and len(form.shape) == 1 for form in set(forms))
            found = Gathered(sizes, plain, len(forms) == len(self.forms) and list(buffers) == sorted(buffers))
            self._gathered[id(buffers)] = found
        return found

    def _read_cluster(self, cluster: Any, taken: set[int]) -> Cluster:
        numbers = _list(cluster)
        if not _are_numbers(numbers) or len(numbers) < 4 or len(numbers) % 2 or numbers[1] > 1:
            raise DecodeError("the table holds a malformed cluster")
        extent, scattered, *flat = numbers
        if not 0 < extent < _LARGEST:
            raise DecodeError(f"the table holds a cluster of {extent} bytes")
        members = tuple(zip(flat[::2], flat[1::2], strict=True))
        for leaf, offset in members:
            if leaf >= len(self.forms) or leaf in taken:
                raise DecodeError(f"leaf {leaf} does not exist or is in two clusters")
            taken.add(leaf)
            self._check_member(self.forms[leaf], offset, extent, bool(scattered))
        nbytes = extent
        if scattered:
            _, nbytes = packed_places([self.forms[leaf] for leaf, _ in members])
        return Cluster(extent, bool(scattered), members, nbytes)

    def _check_member(self, form: Form, offset: int, extent: int, scattered: bool) -> None:
        if form.code == BYTES or not form.hull:
            raise DecodeError("a cluster holds what has no memory to share")
        if offset + form.hull > extent:
            raise DecodeError(f"a leaf reaches from {offset} to {offset + form.hull} in a memory of {extent} bytes")
        if form.is_tensor and offset % form.itemsize:
            raise DecodeError(f"a tensor of {form.dtype} starts at byte {offset} of its memory")
        if scattered and not form.apart:
            raise DecodeError("a leaf that overlaps itself cannot be scattered")

    def _check_size(
        self, kinds: list[Form], inline_bytes: int, segments: Sequence[tuple[int, bool]], max_bytes: int
    ) -> None:
        needed = inline_bytes + sum(nbytes for nbytes, _ in segments)
        needed += sum(cluster.extent for cluster in self.clusters if cluster.scattered)
        if needed > max_bytes:
            raise LimitError(f"the message needs {needed} bytes here, max_bytes is {max_bytes}")
        # A leaf may be a single byte of the message, and of the memory none.
        most_axes = max((len(form.shape) for form in kinds), default=0)
        leaves = len(self.forms) * (_LEAF_BYTES + most_axes * _AXIS_BYTES)
        if leaves > max(max_bytes, _LEAVES_BYTES):
            raise LimitError(f"the {len(self.forms)} tensors of the message need {leaves} bytes here beside their data")

    def _few(self) -> list[tuple[Form, int]]:
        """Of each leaf its form and place, if all are small tensors that are gathered in the inline area."""
        places = {}
        for _, start, _, buffers in self.inline.groups:
            for buffer in buffers:
                places[buffer] = start
                start += self.forms[buffer].hull
        alone = len(places) == len(self.forms)
        return [(form, places[leaf]) for leaf, form in enumerate(self.forms)] if alone else []

    def _all_buffers(self, in_cluster: set[int]) -> tuple[Buffers, list[int]]:
        """Every buffer that is not empty, and the leaves that are."""
        forms = self.forms
        numbers: Sequence[int] = range(len(forms))
        sizes = [form.hull for form in forms]
        groups = [form.group for form in forms]
        empty: list[int] = []
        if in_cluster or 0 in sizes:
            empty = [leaf for leaf in numbers if not sizes[leaf]]
            numbers = [leaf for leaf in numbers if sizes[leaf] and leaf not in in_cluster]
            sizes = [sizes[leaf] for leaf in numbers]
            groups = [groups[leaf] for leaf in numbers]
            numbers += range(len(forms), len(forms) + len(self.clusters))
            sizes += [cluster.nbytes for cluster in self.clusters]
            groups += [-1] * len(self.clusters)
        return Buffers(numbers, sizes, groups), empty


def _read_segment(owner: Any, nbytes: int, rest: dict[int, tuple[int, int]]) -> int | Places:
    """What is in one segment; it is taken out of the rest."""
    try:
        if type(owner) is list:
            if not _are_numbers(owner):
                raise DecodeError("the table names no buffer for a segment")
            places = Places(Buffers.of([(buffer, *rest.pop(buffer)) for buffer in owner]))
            size = places.nbytes
        else:
            if type(owner) is not int:
                raise DecodeError("the table names no buffer for a segment")
            size, _ = rest.pop(owner)
    except KeyError as missing:
        raise DecodeError(f"buffer {missing} does not exist, is empty, or is in two places") from None
    if size != nbytes:
        raise DecodeError(f"a segment has {nbytes} bytes, its contents {size}")
    return places if type(owner) is list else owner


def _read_form(form: Any) -> Form:
    code, flags, shape, strides = _list(form, 4)
    if len(_list(shape)) > _MOST_AXES or not _are_numbers(shape):
        raise DecodeError("the table holds a malformed shape")
    if strides is not None:
        if len(_list(strides)) != len(shape) or not set(map(type, strides)) <= {int}:
            raise DecodeError("the table holds malformed strides")
        if any(not -_LARGEST < stride < _LARGEST for stride in strides):
            raise DecodeError(f"the table holds a stride that is too large: {strides}")
    if type(flags) is not int or flags < 0:
        raise DecodeError("the table holds malformed flags")
    if strides is None and type(code) is int:
        known = tensors.read_before(code, flags, shape)
        if known is not None:
            return known
    try:
        if code == BYTES and type(code) is int:
            if len(shape) != 1 or strides is not None or flags:
                raise DecodeError("the table holds malformed raw bytes")
            return Form(BYTES, None, 1, shape, None)
        if type(code) is int:
            return tensors.read_form(code, flags, shape, strides)
        return arrays.read_form(code, flags, shape, strides)
    except ValueError as error:
        raise DecodeError(f"the table describes a tensor or array wrongly: {error}") from None


def _list(value: Any, size: int | None = None) -> list[Any]:
    if type(value) is not list or (size is not None and len(value) != size):
        raise DecodeError("the table of tensors and arrays is malformed")
    return value


def _are_numbers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < _LARGEST))


def _check_numbers(values: Any, below: int) -> None:
    if not _are_numbers(_list(values)) or (values and max(values) >= below):
        raise DecodeError("a leaf has a form that does not exist")
