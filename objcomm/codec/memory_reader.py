"""The memory of tensors, arrays and buffers on its way in: leaves made over the bytes that have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import DecodeError
from . import arrays, dtypes, tensors
from .address import FEW, copy_memory, word, words
from .blocks import ALIGN, Block
from .form import ACCELERATOR, BYTES, TINY, Form
from .memory_table import Cluster, Table
from .ordinary import Ordinary, is_ordinary
from .overlap import packed_places
from .placing import Places

_CPU = torch.device("cpu")

# torch's stubs say that it returns nothing.
_split: Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]


class MemoryReader:
    """The leaves of a message before its bytes are here. Nothing is allocated.

    Args:
        table: as the sender's ``Memory.table``; see memory.py.
        inline_bytes: size of the inline area.
        segments: of each segment its bytes and whether the sender had them on an accelerator.
        max_bytes: the most memory that the leaves may need.

    Raises:
        DecodeError: the table is malformed, or does not fit the inline area and the segments.
        LimitError: the leaves need more than ``max_bytes``.
    """

    def __init__(self, table: Any, *, inline_bytes: int, segments: Sequence[tuple[int, bool]], max_bytes: int) -> None:
        self.table = Table(table, inline_bytes=inline_bytes, segments=segments, max_bytes=max_bytes)
        # Few are copied, whatever the device.
        self.keeps_inline = not self.table.few
        self._sizes = [inline_bytes, *(nbytes for nbytes, _ in segments)]

    def build(
        self, inline: torch.Tensor, segments: Sequence[torch.Tensor], device: torch.device | None = None
    ) -> list[Any]:
        """The leaves by number: tensors, arrays, and writable memoryviews of raw bytes.

        Small leaves have memory of their own. Others look at a part of what arrived, which they keep alive as a whole.

        Args:
            inline: the inline area, uint8 on the CPU. The leaves own it from now on, and the segments too.
            segments: flat uint8 tensors.
            device: where all tensors shall be; None leaves each where its bytes are. Arrays are always on the CPU.

        Raises:
            DecodeError: sizes are not as announced.
        """
        if [inline.numel(), *[segment.numel() for segment in segments]] != self._sizes:
            raise DecodeError("what arrived has other sizes than what was announced")
        few = self.table.few
        if few and device is None and inline.is_cpu and is_ordinary():
            return _copies(few, inline.data_ptr())
        with Ordinary():
            return _Builder(self.table, device).build(inline, segments)


class _Builder:
    def __init__(self, table: Table, device: torch.device | None) -> None:
        self._table = table
        self._device = device
        self._leaves: list[Any] = [None] * len(table.forms)

    def build(self, inline: torch.Tensor, segments: Sequence[torch.Tensor]) -> list[Any]:
        table = self._table
        if inline.numel():
            self._area(inline, table.inline)
        for segment, contents in zip(segments, table.segments, strict=True):
            if isinstance(contents, Places):
                self._area(segment, contents)
            else:
                self._buffer(contents, Block(segment, self._device if self._has_tensor(contents) else None))
        for leaf in table.empty:
            self._empty(leaf, segments)
        return self._leaves

    def _has_tensor(self, buffer: int) -> bool:
        return buffer >= len(self._leaves) or self._table.forms[buffer].is_tensor

    def _area(self, area: torch.Tensor, places: Places) -> None:
        device = self._device
        if device is not None and not places.groups:
            # What holds no tensor stays where it is.
            device = device if any(self._has_tensor(buffer) for _, _, buffer in places.singles) else None
        block = Block(area, device)
        for code, start, end, buffers in places.groups:
            address = block.address() if len(buffers) <= FEW else None
            if address is None:
                self._group(dtypes.BY_CODE[code], block.part(start, end), buffers)
            else:
                self._copies(address + start, buffers)
        singles = places.singles if block.address() is None else self._windows(block, places.singles)
        for start, end, buffer in singles:
            self._buffer(buffer, block.part(start, end))

    def _group(self, dtype: torch.dtype, block: Block, buffers: Sequence[int]) -> None:
        """Small tensors of one dtype. Each gets memory of its own, so that it can grow without touching another."""
        forms, leaves = self._table.forms, self._leaves
        together = block.typed(dtype)
        gathered = self._table.gathered(buffers)
        sizes = gathered.sizes
        parts: Sequence[torch.Tensor]
        if tensors.on_accelerator(together.device):
            # There is one kernel for all of them, but only where the results exist already.
            parts = [together.new_empty(size) for size in sizes]
            torch.split_with_sizes_copy(together, sizes, out=parts)
        else:
            parts = _split(together, sizes)
        if gathered.plain:
            if gathered.all:
                leaves[:] = parts
                return
            for buffer, part in zip(buffers, parts, strict=True):
                leaves[buffer] = part
            return
        for buffer, part in zip(buffers, parts, strict=True):
            form = forms[buffer]
            if len(form.shape) != 1:
                part.resize_(form.shape)
            leaves[buffer] = tensors.finished(form, part) if form.flags else part

    def _copies(self, address: int, buffers: Sequence[int]) -> None:
        """The same on the CPU, for so few that the preparation would take longer than the copies."""
        places: list[tuple[Form, int]] = []
        start = 0
        for buffer in buffers:
            form = self._table.forms[buffer]
            places.append((form, start))
            start += form.hull
        for buffer, leaf in zip(buffers, _copies(places, address), strict=True):
            self._leaves[buffer] = leaf

    def _windows(self, block: Block, singles: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Make the tensors that look at their part of what arrived on the CPU; returns the buffers that are not such.

        It is what :meth:`_buffer` does, in one loop.
        """
        forms, leaves = self._table.forms, self._leaves
        storage, offset, address = block.place()
        most = storage.nbytes()
        others = []
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        for single in singles:
            start, end, buffer = single
            form = forms[buffer] if buffer < len(forms) else None
            if form is None or not form.is_tensor or not TINY <= end - start < most or (address + start) % ALIGN:
                others.append(single)
                continue
            if form.dtype is not empty.dtype:
                empty = torch.empty(0, dtype=form.dtype, device="cpu")
            window = storage[offset + start : offset + end]
            leaf = torch.empty_like(empty).set_(window, 0, form.shape, form.steps)
            leaves[buffer] = tensors.finished(form, leaf) if form.flags else leaf
        return others

    def _buffer(self, buffer: int, block: Block) -> None:
        number = buffer - len(self._leaves)
        if number >= 0:
            self._cluster(self._table.clusters[number], block)
            return
        form = self._table.forms[buffer]
        if form.is_tensor:
            leaf: Any = tensors.finished(form, tensors.over(form, block.storage(), 0))
        elif form.code == BYTES:
            leaf = block.memoryview()
        elif form.hull < TINY:
            leaf = arrays.finished(form, arrays.fresh(form, block.host()))
        else:
            leaf = arrays.finished(form, arrays.over(form, block.host(), 0))
        self._leaves[buffer] = leaf

    def _cluster(self, cluster: Cluster, block: Block) -> None:
        """Tensors of a cluster are views of one tensor, so that autograd knows that they share memory."""
        if cluster.scattered:
            block = self._scattered(cluster, block)
        forms = [self._table.forms[leaf] for leaf, _ in cluster.members]
        of_tensors = [form for form in forms if form.is_tensor]
        base = tensors.base_of(of_tensors, block.storage()) if of_tensors else None
        for form, (leaf, offset) in zip(forms, cluster.members, strict=True):
            if base is not None and form.is_tensor:
                self._leaves[leaf] = tensors.finished(form, tensors.view(form, base, offset))
            else:
                self._leaves[leaf] = arrays.finished(form, arrays.over(form, block.host(), offset))

    def _scattered(self, cluster: Cluster, block: Block) -> Block:
        forms = [self._table.forms[leaf] for leaf, _ in cluster.members]
        packed = block.bytes()
        shared = packed.new_zeros(cluster.extent)
        starts, _ = packed_places(forms)
        for form, start, (_, offset) in zip(forms, starts, cluster.members, strict=True):
            jumps, run, _ = form.axes
            target = words(shared.untyped_storage(), offset, jumps, run, word(0, offset, jumps, run))
            source = words(packed.untyped_storage(), start, (), form.shown, target.element_size())
            target.copy_(source.view(target.shape))
        return Block(shared, None)

    def _empty(self, leaf: int, segments: Sequence[torch.Tensor]) -> None:
        """A leaf without a byte: it comes from nowhere, so its device has to be found."""
        form = self._table.forms[leaf]
        device = torch.device("cpu")
        if form.is_tensor:
            device = self._device or self._home(form, segments)
        block = Block(torch.empty(0, dtype=torch.uint8, device=device), None)
        self._buffer(leaf, block)

    def _home(self, form: Form, segments: Sequence[torch.Tensor]) -> torch.device:
        if not form.flags & ACCELERATOR:
            return torch.device("cpu")
        there = (segment.device for segment in segments if tensors.on_accelerator(segment.device))
        return next(there, None) or tensors.current_accelerator()


def _copies(places: list[tuple[Form, int]], address: int) -> list[Any]:
    """Tensors with memory of their own, each a copy of what is at its place."""
    leaves: list[Any] = []
    for form, start in places:
        # torch takes apart a list of extents, or worse a torch.Size, twice as slowly as so many numbers.
        leaf = torch.empty(*(form.shape or ((),)), dtype=form.dtype, device=_CPU)
        copy_memory(leaf.data_ptr(), address + start, form.hull)
        leaves.append(tensors.finished(form, leaf) if form.flags else leaf)
    return leaves
