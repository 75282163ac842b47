"""Leaves whose memory overlaps: which ones must share memory at the receiver, and what of it travels.

The *hull* of a leaf goes from its first byte to its last. Leaves whose hulls overlap may still not have a byte in
common (the columns of a matrix): those become independent. What does overlap becomes a cluster, one piece of memory
that all its members look at:

- the memory as it is, if its members show most of it;
- else, where the members step through it in the same way, the memory with the steps made shorter;
- else each member for itself, to be scattered into shared memory of the original size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import EncodeError
from .form import Form

# Where single runs of bytes have to be compared, up to so many are; beyond that leaves count as overlapping.
_MOST_RUNS = 1 << 20

# Members of a scattered cluster start at multiples of this in what travels.
PACKED_ALIGN = 16


@dataclass(frozen=True)
class Span:
    """A leaf and the address of its lowest byte."""

    leaf: int
    low: int
    form: Form

    @property
    def high(self) -> int:
        return self.low + self.form.hull

    @property
    def align(self) -> int:
        return self.form.itemsize if self.form.is_tensor else 1


@dataclass
class Cluster:
    """Memory that several leaves share.

    Attributes:
        members: the leaves and where the lowest byte of each is, counted from the start of the memory.
        extent: bytes of the memory.
        scattered: what travels is the members, packed one after the other, not the memory.
        low: address from which on the memory is as it is at the sender, or None if it has to be put together.
        padding: bytes in front of that, so that all members are aligned to their element size.
        forms: of the members, where they differ from those at the sender.
    """

    members: list[tuple[int, int]]
    extent: int
    scattered: bool = False
    low: int | None = None
    padding: int = 0
    forms: dict[int, Form] = field(default_factory=dict)

    def nbytes(self, forms: Sequence[Form]) -> int:
        """Bytes that travel."""
        if not self.scattered:
            return self.extent
        return packed_places([forms[leaf] for leaf, _ in self.members])[1]

    def wire(self) -> list[int]:
        flat = [number for member in self.members for number in member]
        return [self.extent, int(self.scattered), *flat]


def packed_places(forms: Iterable[Form]) -> tuple[list[int], int]:
    """Where the packed members of a scattered cluster start, and the size of all of them."""
    places: list[int] = []
    end = 0
    for form in forms:
        start = -(-end // PACKED_ALIGN) * PACKED_ALIGN
        places.append(start)
        end = start + form.shown
    return places, end


def clusters_of(spans: list[Span]) -> list[Cluster]:
    """The clusters among these leaves of one device, in order of address. A leaf in none of them is independent."""
    found: list[Cluster] = []
    for group in _touching(spans):
        if _is_dense(group) or not all(span.form.apart for span in group):
            found.append(_as_it_is(group))
            continue
        for part in _separate([_Steps(span, span.low, _steps(span.form)) for span in group]):
            for rest in _touching(part):
                found.append(_as_it_is(rest) if _is_dense(rest) else _squeezed(rest) or _scattered(rest))
    return found


def sharing_of(spans: list[Span]) -> list[list[Span]]:
    """The sets of two and more leaves that may have bytes in common."""
    parts = [
        part
        for group in _touching(spans)
        for part in _separate([_Steps(span, span.low, _steps(span.form)) for span in group])
    ]
    return [group for part in parts for group in _touching(part)]


_T = TypeVar("_T", bound="Span | _Steps")


def _touching(spans: list[_T]) -> list[list[_T]]:
    """The sets of two and more whose hulls form one interval."""
    return [group for group in _groups(spans) if len(group) > 1]


def _groups(spans: list[_T]) -> list[list[_T]]:
    groups: list[list[_T]] = []
    reach = -1
    for span in sorted(spans, key=lambda span: span.low):
        if span.low < reach:
            groups[-1].append(span)
        else:
            groups.append([span])
        reach = max(reach, span.high)
    return groups


def _is_dense(group: list[Span]) -> bool:
    extent = max(span.high for span in group) - group[0].low
    return extent <= sum(span.form.shown for span in group)


def _padding(offsets: list[tuple[int, int]]) -> int:
    """What to put in front so that every offset is a multiple of its alignment."""
    for padding in range(16):
        if all((offset + padding) % align == 0 for offset, align in offsets):
            return padding
    raise EncodeError("tensors overlap in a way in which not all can be aligned", hint="send a copy of one of them")


def _as_it_is(group: list[Span]) -> Cluster:
    low = group[0].low
    extent = max(span.high for span in group) - low
    padding = _padding([(span.low - low, span.align) for span in group])
    members = [(span.leaf, span.low - low + padding) for span in group]
    return Cluster(members, extent + padding, low=low, padding=padding)


def _scattered(group: list[Span]) -> Cluster:
    cluster = _as_it_is(group)
    return Cluster(cluster.members, cluster.extent, scattered=True)


# -- telling apart what only looks as if it overlapped -----------------------------------------------------------------


@dataclass(frozen=True)
class _Steps:
    """A span, or what is left of one after its place in the repetitions of wider strides is taken away."""

    span: Span
    low: int
    steps: tuple[tuple[int, int], ...]  # (stride, extent), widest first

    @property
    def high(self) -> int:
        return self.low + self.span.form.itemsize + sum((extent - 1) * stride for stride, extent in self.steps)

    def within(self, stride: int, base: int) -> _Steps:
        """The same inside of one repetition of ``stride``."""
        rest = tuple(step for step in self.steps if step[0] != stride)
        return _Steps(self.span, (self.low - base) % stride, rest)


def _steps(form: Form) -> tuple[tuple[int, int], ...]:
    pairs = zip(form.strides, form.shape, strict=True)
    return tuple(sorted(((abs(stride), extent) for stride, extent in pairs if extent > 1 and stride), reverse=True))


def _reduce(group: list[_Steps]) -> tuple[int, int, list[_Steps]] | None:
    """The widest stride, where its repetitions start, and the group inside of one; None if not all fit into one."""
    stride = max((step[0] for each in group for step in each.steps), default=0)
    for base in {each.low for each in group[:8]} if stride else ():
        inside = [each.within(stride, base) for each in group]
        if all(each.high <= stride for each in inside):
            return stride, base, inside
    return None


def _separate(group: list[_Steps]) -> list[list[Span]]:
    """The sets that may have bytes in common with none of another set."""
    parts: list[list[Span]] = []
    for touching in _groups(group):
        reduced = _reduce(touching) if len(touching) > 1 else None
        if reduced is not None:
            parts += _separate(reduced[2])
        elif len(touching) > 1 and any(each.steps for each in touching):
            parts += _compare_runs([each.span for each in touching])
        else:
            parts.append([each.span for each in touching])
    return parts


def _compare_runs(group: list[Span]) -> list[list[Span]]:
    """The sets that have no byte in common, found by looking at every run of bytes."""
    total = 0
    for span in group:
        runs = 1
        for extent, _ in span.form.axes[0]:
            runs *= extent
        total += runs
    if total > _MOST_RUNS:
        return [group]
    first = min(span.low for span in group)
    starts, ends, owners = [], [], []
    for owner, span in enumerate(group):
        jumps, run, _ = span.form.axes
        places = torch.tensor([span.low - first], device="cpu")
        for extent, stride in jumps:
            places = (places[:, None] + torch.arange(extent, device="cpu") * stride).flatten()
        starts.append(places)
        ends.append(places + run)
        owners.append(torch.full_like(places, owner))
    start, order = torch.cat(starts).sort()
    owner_of = torch.cat(owners)[order]
    reach = torch.cat(ends)[order].cummax(0).values
    meets = (start[1:] < reach[:-1]) & (owner_of[1:] != owner_of[:-1])
    pairs = torch.unique(owner_of[1:][meets] * len(group) + owner_of[:-1][meets])
    root = list(range(len(group)))
    for pair in pairs.tolist():
        one, other = root[pair // len(group)], root[pair % len(group)]
        root = [one if each == other else each for each in root]
    return [[span for span, each in zip(group, root, strict=True) if each == which] for which in sorted(set(root))]


# -- making the gaps smaller that all members leave --------------------------------------------------------------------


def _squeezed(group: list[Span]) -> Cluster | None:
    """A cluster in which strides that the members have in common are shorter; None if they have none."""
    align = max(span.align for span in group)
    shorter: dict[int, int] = {}
    lows = _squeeze([_Steps(span, span.low, _steps(span.form)) for span in group], align, shorter)
    if lows is None:
        return None
    forms: dict[int, Form] = {}
    extent = 0
    for span, low in zip(group, lows, strict=True):
        form = span.form
        strides = [
            0 if not stride else shorter.get(abs(stride), form.itemsize) * (1 if stride > 0 else -1)
            for stride in form.strides
        ]
        forms[span.leaf] = form.with_strides(strides)
        extent = max(extent, low + forms[span.leaf].hull)
        if low % span.align:
            return None
    if extent > sum(span.form.shown for span in group):
        return None
    return Cluster([(span.leaf, low) for span, low in zip(group, lows, strict=True)], extent, forms=forms)


def _squeeze(group: list[_Steps], align: int, shorter: dict[int, int]) -> list[int] | None:
    """New places of the members of a group; ``shorter`` takes what becomes of their strides."""
    if not any(each.steps for each in group):
        first = min(each.low for each in group)
        return [each.low - first for each in group]
    reduced = _reduce(group)
    if reduced is None:
        return None
    stride, base, inside = reduced
    places = _squeeze(inside, align, shorter)
    if places is None:
        return None
    size = 0
    for each, place in zip(inside, places, strict=True):
        reach = sum((extent - 1) * shorter[inner] for inner, extent in each.steps)
        size = max(size, place + each.span.form.itemsize + reach)
    shorter[stride] = -(-size // align) * align
    numbers: list[Any] = [(each.low - base) // stride for each in group]
    return [(number - min(numbers)) * shorter[stride] + place for number, place in zip(numbers, places, strict=True)]
