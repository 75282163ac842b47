"""The memory of tensors, arrays and buffers on its way out: what of it travels, and how.

The table that describes it to the receiver is ``[forms, leaves, clusters, segments]``:

- forms: ``[code, flags, shape, strides]``, each different one once; strides in bytes, None for row-major order.
- leaves: of each leaf its form.
- clusters: ``[extent, scattered, leaf, offset, leaf, offset, ...]``, memory that several leaves look at.
- segments: of each segment the buffer in it, or the list of the buffers that an accelerator gathered in it.

A leaf that is in no cluster is a *buffer* of its own, numbered like the leaf, of as many bytes as its form reaches
over. The clusters are buffers too, numbered after the leaves. What is in no segment is in the inline area; placing.py
says where. Empty leaves are in neither.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from itertools import pairwise
from operator import itemgetter, sub
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EncodeError
from . import arrays, dtypes, tensors
from .address import address_of, clear_memory, window_at
from .columns import Columns, columns_of
from .form import BYTES, Form, longest
from .layout import Layout
from .memory_reader import MemoryReader
from .ordinary import Ordinary
from .overlap import Cluster, Span, clusters_of
from .sources import Sources

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Memory", "MemoryReader", "MemoryWriter"]


class MemoryWriter:
    """Collects the leaves of one message.

    Args:
        threshold: bytes from which on a buffer becomes a segment.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._index: dict[int, int] = {}
        self._known: dict[Any, Form] = {}
        # Of each leaf: the object, its form, the address of its lowest byte, its device unless that is the CPU.
        self._leaves: list[Any] = []
        self._forms: list[Form] = []
        self._lows: list[int] = []
        self._devices: dict[int, torch.device] = {}

    def add_tensor(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that is plain, see ``tensors.is_plain``; the same object has one number.

        Raises:
            EncodeError: there is no memory behind it, or its dtype cannot be sent.
        """
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self._leaves)
            columns = columns_of([tensor])
            if columns is None:
                raise EncodeError("the tensor was changed by another thread while it was encoded")
            self.add_columns([tensor], columns)
        return index

    def add_columns(self, found: list[torch.Tensor], columns: Columns) -> None:
        """Number tensors that have no number yet, in their order."""
        first = len(self._leaves)
        self._leaves += found
        self._forms += columns.forms
        self._lows += columns.lows
        if columns.devices:
            self._devices.update((first + place, device) for place, device in columns.devices.items())

    def add_array(self, array: np.ndarray[Any, Any]) -> int:
        """The number of an array that is plain, see ``arrays.is_plain``; the same object has one number.

        Raises:
            EncodeError: it is too large to be described.
        """
        index = self._index.get(id(array))
        if index is not None:
            return index
        key = (id(array.dtype), array.shape, array.strides, array.flags.writeable)
        form = self._known.get(key)
        if form is None:
            form = self._known[key] = arrays.form_of(array)
        return self._add(array, form, arrays.address_of(array) - form.lead)

    def add_bytes(self, buffer: Any) -> int:
        """The number of any contiguous buffer. It arrives as a writable memoryview of bytes that nothing else uses."""
        view = memoryview(buffer)
        view = view if view.nbytes == 0 else view.cast("B")
        form = Form(BYTES, None, 1, [view.nbytes], None)
        return self._add(view, form, address_of(view))

    def _add(self, leaf: Any, form: Form, low: int) -> int:
        index = len(self._leaves)
        self._index[id(leaf)] = index
        self._leaves.append(leaf)
        self._forms.append(form)
        self._lows.append(low)
        return index

    def overlaps(self) -> Callable[[torch.Tensor], bool]:
        """What says whether the storage of a tensor has bytes in common with the leaves that are there by now."""
        lows: list[int] = []
        highs: list[int] = []
        for low, form in sorted(zip(self._lows, self._forms, strict=True), key=itemgetter(0)):
            if form.hull and form.code != BYTES:
                lows.append(low)
                highs.append(max(low + form.hull, highs[-1] if highs else 0))

        def overlap(tensor: torch.Tensor) -> bool:
            storage = tensor.untyped_storage()
            before = bisect_left(lows, storage.data_ptr() + storage.nbytes())
            return before > 0 and highs[before - 1] > storage.data_ptr()

        return overlap

    def finish(self) -> Memory:
        """Decide what travels how. The leaves must stay as they are until the message has left.

        Raises:
            EncodeError: leaves overlap in a way that cannot be described.
        """
        forms, lows, devices = self._forms, self._lows, self._devices
        if devices or not _far_apart(lows, forms):
            with Ordinary():
                clusters = self._clusters()
        else:
            layout = Layout.earlier(forms, self._threshold)
            if layout is not None:
                return Memory(Sources(self._leaves, forms, lows, devices, [], forms), [], layout)
            clusters = []
        sources = Sources(self._leaves, forms, lows, devices, clusters)
        buffers = sources.buffers()
        segments: list[torch.Tensor] = []
        owners: list[int | list[int]] = []
        if devices or max(buffers.sizes, default=0) >= self._threshold:
            with Ordinary():
                owners, segments, buffers = sources.segments(buffers, self._threshold)
        layout = Layout(sources.sent, [cluster.wire() for cluster in clusters], owners, buffers)
        if not segments and sources.sent is forms:
            layout.keep(forms, self._threshold)
        return Memory(sources, segments, layout)

    def _clusters(self) -> list[Cluster]:
        domains: dict[Hashable, list[tuple[int, int, int]]] = {None: []}
        devices = self._devices
        for leaf, (low, form) in enumerate(zip(self._lows, self._forms, strict=True)):
            if form.hull and form.code != BYTES:
                domain = tensors.domain_of(self._leaves[leaf]) if leaf in devices else None
                domains.setdefault(domain, []).append((low, low + form.hull, leaf))
        clusters: list[Cluster] = []
        for spans in domains.values():
            spans.sort()
            if any(after[0] < before[1] for before, after in pairwise(spans)):
                clusters += clusters_of([Span(leaf, low, self._forms[leaf]) for low, _, leaf in spans])
        return clusters


def _far_apart(lows: list[int], forms: list[Form]) -> bool:
    """A quick look whether leaves on the CPU cannot overlap: there is room for the longest between any two."""
    if len(lows) == 1:
        return True
    ordered = sorted(lows)
    most = longest(forms)
    return min(map(sub, ordered[1:], ordered), default=most) >= most


class Memory:
    """The memory of one message, ready to leave. It keeps the leaves alive.

    Attributes:
        layout: the inline area, and the table that describes all to the receiver.
        segments: flat uint8 tensors, each a transfer of its own.
    """

    __slots__ = ("_sources", "layout", "segments")

    def __init__(self, sources: Sources, segments: list[torch.Tensor], layout: Layout) -> None:
        self._sources = sources
        self.segments = segments
        self.layout = layout

    @property
    def leaves(self) -> list[Any]:
        """Tensors, arrays and memoryviews, by number."""
        return self._sources.leaves

    @property
    def table(self) -> list[Any]:
        """The table, in types that msgpack has."""
        return self.layout.table

    @property
    def inline_bytes(self) -> int:
        """Size of the inline area."""
        return self.layout.nbytes

    def write_inline(self, out: torch.Tensor) -> None:
        """Fill the inline area.

        Args:
            out: uint8, contiguous, on the CPU, of ``inline_bytes`` elements.
        """
        if out.numel() != self.inline_bytes:
            raise ValueError(f"the inline area has {self.inline_bytes} bytes, not {out.numel()}")
        self.write_at(out.data_ptr())

    def write_at(self, target: int) -> None:
        """The same for an address on the CPU, where ``inline_bytes`` bytes may be written."""
        layout = self.layout
        for code, start, end, buffers, flat in layout.gathers:
            with Ordinary():
                self._sources.gather(buffers, window_at(target + start, end - start, dtypes.BY_CODE[code]), flat)
        if layout.copies:
            self._sources.copy(layout.copies, target)
        for start, end in layout.gaps:
            clear_memory(target + start, 0, end - start)
