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

from collections.abc import Hashable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EncodeError
from . import arrays, dtypes, tensors
from .address import FEW, address_of, clear_memory, window_at
from .form import ACCELERATOR, BYTES, Form
from .memory_reader import MemoryReader
from .ordinary import Ordinary
from .overlap import Cluster, Span, clusters_of
from .placing import Places
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
        if index is not None:
            return index
        key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.is_cpu, type(tensor))
        form = self._known.get(key)
        if form is None:
            form = self._known[key] = tensors.form_of(tensor)
        storage = tensor.untyped_storage()
        low = tensor.data_ptr()
        if form.hull and (not low or storage.nbytes() < tensor.storage_offset() * form.itemsize + form.hull):
            raise EncodeError(
                f"a tensor of shape {list(tensor.shape)} has no memory behind it: its storage was freed or shrunk",
                hint="send it before its storage is resized, or gather it first",
            )
        index = self._add(tensor, form, low)
        if form.flags & ACCELERATOR:
            self._devices[index] = tensor.device
        return index

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

    def finish(self) -> Memory:
        """Decide what travels how. The leaves must stay as they are until the message has left.

        Raises:
            EncodeError: leaves overlap in a way that cannot be described.
        """
        with Ordinary():
            sources = Sources(self._leaves, self._forms, self._lows, self._devices, self._clusters())
            return Memory(sources, self._threshold)

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


class Memory:
    """The memory of one message, ready to leave. It keeps the leaves alive.

    Attributes:
        table: describes it to the receiver, in types that msgpack has.
        segments: flat uint8 tensors, each a transfer of its own.
        inline_bytes: size of the inline area.
    """

    def __init__(self, sources: Sources, threshold: int) -> None:
        self._sources = sources
        self.segments: list[torch.Tensor] = []
        inline: list[tuple[int, int, int]] = []
        gathered: dict[torch.device, list[tuple[int, int, int]]] = {}
        owners: list[int | list[int]] = []
        for buffer, nbytes, group in sources.buffers():
            if nbytes >= threshold:
                owners.append(buffer)
                self.segments.append(sources.flat(buffer))
                continue
            device = sources.device(buffer)
            (inline if device is None else gathered.setdefault(device, [])).append((buffer, nbytes, group))
        for device, buffers in gathered.items():
            owners.append([buffer for buffer, _, _ in buffers])
            self.segments.append(self._gathered(device, Places(buffers)))
        self._places = Places(inline)
        self.inline_bytes = self._places.nbytes
        numbers: dict[Form, int] = {}
        leaves = [numbers.setdefault(form, len(numbers)) for form in sources.sent]
        clusters = [cluster.wire() for cluster in sources.clusters]
        self.table: list[Any] = [[form.wire() for form in numbers], leaves, clusters, owners]

    def write_inline(self, out: torch.Tensor) -> None:
        """Fill the inline area.

        Args:
            out: uint8, contiguous, on the CPU, of ``inline_bytes`` elements.
        """
        if out.numel() != self.inline_bytes:
            raise ValueError(f"the inline area has {self.inline_bytes} bytes, not {out.numel()}")
        places, target = self._places, out.data_ptr()
        for code, start, end, buffers in places.groups:
            if len(buffers) > FEW:
                with Ordinary():
                    self._gather(buffers, window_at(target + start, end - start, dtypes.BY_CODE[code]))
                continue
            for buffer in buffers:
                start = self._sources.copy(buffer, target, start)
        for start, _, buffer in places.singles:
            self._sources.copy(buffer, target, start)
        for start, end in places.gaps():
            clear_memory(target + start, 0, end - start)

    def _gather(self, buffers: list[int], window: torch.Tensor) -> None:
        """Small tensors of one dtype, one after the other."""
        parts = [self._sources.leaves[buffer] for buffer in buffers]
        if any(len(self._sources.sent[buffer].shape) != 1 for buffer in buffers):
            parts = list(map(torch.Tensor.ravel, parts))
        torch.cat(parts, out=window)

    def _gathered(self, device: torch.device, places: Places) -> torch.Tensor:
        area = torch.zeros(places.nbytes, dtype=torch.uint8, device=device)
        for code, start, end, buffers in places.groups:
            self._gather(buffers, area[start:end].view(dtypes.BY_CODE[code]))
        for start, end, buffer in places.singles:
            area[start:end].copy_(self._sources.flat(buffer))
        return area
