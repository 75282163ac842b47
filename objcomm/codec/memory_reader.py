"""The memory of tensors, arrays and buffers on its way in: leaves made over the bytes that have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import DecodeError
from . import arrays, dtypes, tensors
from .address import FEW, copy_memory, view_at, word, words
from .form import ACCELERATOR, BYTES, TINY, Form
from .memory_table import Cluster, Table
from .ordinary import Ordinary
from .overlap import packed_places
from .placing import Places

# Storage of torch starts at a multiple of 64; what uses wide instructions on it relies on no more than this.
_ALIGN = 16

# torch's stubs say that it returns nothing.
_split: Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]

# From here on raw bytes are handed out without a copy, which takes numpy.
_LARGE = 1 << 16


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
        if [inline.numel(), *(segment.numel() for segment in segments)] != self._sizes:
            raise DecodeError("what arrived has other sizes than what was announced")
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
                self._buffer(contents, _Block(segment, self._device if self._has_tensor(contents) else None))
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
        block = _Block(area, device)
        for code, start, end, buffers in places.groups:
            address = block.address() if len(buffers) <= FEW else None
            if address is None:
                self._group(dtypes.BY_CODE[code], block.part(start, end), buffers)
            else:
                self._copies(address + start, buffers)
        for start, end, buffer in places.singles:
            self._buffer(buffer, block.part(start, end))

    def _group(self, dtype: torch.dtype, block: _Block, buffers: list[int]) -> None:
        """Small tensors of one dtype. Each gets memory of its own, so that it can grow without touching another."""
        forms, leaves = self._table.forms, self._leaves
        together = block.typed(dtype)
        sizes = [forms[buffer].hull // dtype.itemsize for buffer in buffers]
        parts: Sequence[torch.Tensor]
        if tensors.on_accelerator(together.device):
            # There is one kernel for all of them, but only where the results exist already.
            parts = [together.new_empty(size) for size in sizes]
            torch.split_with_sizes_copy(together, sizes, out=parts)
        else:
            parts = _split(together, sizes)
        for buffer, part in zip(buffers, parts, strict=True):
            form = forms[buffer]
            if len(form.shape) != 1:
                part.resize_(form.shape)
            leaves[buffer] = tensors.finished(form, part) if form.flags else part

    def _copies(self, address: int, buffers: list[int]) -> None:
        """The same on the CPU, for so few that the preparation would take longer than the copies."""
        for buffer in buffers:
            form = self._table.forms[buffer]
            leaf = torch.empty(form.shape, dtype=form.dtype, device="cpu")
            copy_memory(leaf.data_ptr(), address, form.hull)
            self._leaves[buffer] = tensors.finished(form, leaf) if form.flags else leaf
            address += form.hull

    def _buffer(self, buffer: int, block: _Block) -> None:
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

    def _cluster(self, cluster: Cluster, block: _Block) -> None:
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

    def _scattered(self, cluster: Cluster, block: _Block) -> _Block:
        forms = [self._table.forms[leaf] for leaf, _ in cluster.members]
        packed = block.bytes()
        shared = packed.new_zeros(cluster.extent)
        starts, _ = packed_places(forms)
        for form, start, (_, offset) in zip(forms, starts, cluster.members, strict=True):
            jumps, run, _ = form.axes
            target = words(shared.untyped_storage(), offset, jumps, run, word(0, offset, jumps, run))
            source = words(packed.untyped_storage(), start, (), form.shown, target.element_size())
            target.copy_(source.view(target.shape))
        return _Block(shared, None)

    def _empty(self, leaf: int, segments: Sequence[torch.Tensor]) -> None:
        """A leaf without a byte: it comes from nowhere, so its device has to be found."""
        form = self._table.forms[leaf]
        device = torch.device("cpu")
        if form.is_tensor:
            device = self._device or self._home(form, segments)
        block = _Block(torch.empty(0, dtype=torch.uint8, device=device), None)
        self._buffer(leaf, block)

    def _home(self, form: Form, segments: Sequence[torch.Tensor]) -> torch.device:
        if not form.flags & ACCELERATOR:
            return torch.device("cpu")
        there = (segment.device for segment in segments if tensors.on_accelerator(segment.device))
        return next(there, None) or tensors.current_accelerator()


class _Whole:
    """A block of bytes that have arrived, and the same bytes where tensors shall be.

    Attributes:
        arrived: the bytes.
        home: the bytes where tensors shall be.
        accelerator: whether that is an accelerator.
        storage, offset, address: where ``home`` lies.
    """

    __slots__ = ("accelerator", "address", "arrived", "home", "offset", "storage")

    def __init__(self, arrived: torch.Tensor, device: torch.device | None) -> None:
        self.arrived = arrived
        self.home = home = arrived if device is None else arrived.to(device)
        self.accelerator = tensors.on_accelerator(home.device)
        self.storage = home.untyped_storage()
        self.offset = int(home.storage_offset())
        self.address = home.data_ptr()


class _Block:
    """Bytes that have arrived, and where tensors over them shall be.

    Args:
        flat: the bytes.
        device: where tensors shall be, None for where the bytes are.
    """

    __slots__ = ("_device", "_end", "_flat", "_start", "_storage", "_whole")

    def __init__(self, flat: torch.Tensor, device: torch.device | None) -> None:
        self._whole = _Whole(flat, device)
        self._start = 0
        self._end = flat.numel()
        self._storage: torch.UntypedStorage | None = None

    def part(self, start: int, end: int) -> _Block:
        part = _Block.__new__(_Block)
        part._whole = self._whole
        part._start = self._start + start
        part._end = self._start + end
        part._storage = None
        return part

    @property
    def _arrived(self) -> torch.Tensor:
        return self._whole.arrived[self._start : self._end]

    @property
    def _home(self) -> torch.Tensor:
        return self._whole.home[self._start : self._end]

    def address(self) -> int | None:
        """Where the bytes are, if tensors over them shall be on the CPU too."""
        return None if self._whole.accelerator else self._whole.address + self._start

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as elements of that dtype."""
        home = self._home
        if home.storage_offset() % dtype.itemsize or home.data_ptr() % dtype.itemsize:
            home = home.clone()
        count, first = home.numel() // dtype.itemsize, home.storage_offset() // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=home.device)
        return empty.set_(home.untyped_storage(), first, (count,), (1,))

    def storage(self) -> torch.UntypedStorage:
        """Memory that holds these bytes and no others.

        It is what arrived, a part of that, or a copy: of little bytes, and of a part on an accelerator, whose
        allocator only knows memory that it gave out itself.
        """
        if self._storage is None:
            whole, size = self._whole, self._end - self._start
            first = whole.offset + self._start
            if (whole.address + self._start) % _ALIGN:
                self._storage = self._home.clone().untyped_storage()
            elif size == whole.storage.nbytes():
                self._storage = whole.storage
            elif size < TINY or whole.accelerator:
                self._storage = self._home.clone().untyped_storage()
            else:
                self._storage = whole.storage[first : first + size]
        return self._storage

    def bytes(self) -> torch.Tensor:
        """The bytes of :meth:`storage`."""
        return words(self.storage(), 0, (), self._end - self._start, 1)

    def host(self) -> torch.Tensor:
        """The bytes on the CPU: those of :meth:`storage` if that is there."""
        return self._arrived.to("cpu") if self._whole.accelerator else self.bytes()

    def memoryview(self) -> memoryview:
        """The bytes for whoever wants a buffer."""
        flat = self._arrived.to("cpu")
        if flat.numel() >= _LARGE:
            try:
                bytes_: Any = flat.numpy()
                return memoryview(bytes_)
            except RuntimeError:
                pass  # torch finds no numpy
        return memoryview(bytearray(view_at(flat.data_ptr(), flat.numel())))
