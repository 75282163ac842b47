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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EncodeError
from . import arrays, dtypes, tensors
from .address import FEW, address_of, bytes_at, clear_memory, copy_memory, window_at, word, words
from .form import ACCELERATOR, BYTES, Form
from .memory_reader import MemoryReader
from .ordinary import Ordinary
from .overlap import Cluster, Span, clusters_of, packed_places
from .placing import Places

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
        self.leaves: list[Any] = []
        self.forms: list[Form] = []
        self.lows: list[int] = []
        self.devices: dict[int, torch.device] = {}

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
        if form.hull and storage.nbytes() < tensor.storage_offset() * form.itemsize + form.hull:
            raise EncodeError(
                f"a tensor of shape {list(tensor.shape)} has no memory behind it: its storage was freed or shrunk",
                hint="send it before its storage is resized, or gather it first",
            )
        index = self._add(tensor, form, tensor.data_ptr())
        if form.flags & ACCELERATOR:
            self.devices[index] = tensor.device
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
        index = len(self.leaves)
        self._index[id(leaf)] = index
        self.leaves.append(leaf)
        self.forms.append(form)
        self.lows.append(low)
        return index

    def finish(self) -> Memory:
        """Decide what travels how. The leaves must stay as they are until the message has left.

        Raises:
            EncodeError: leaves overlap in a way that cannot be described.
        """
        with Ordinary():
            return Memory(self, self._threshold, self._clusters())

    def _clusters(self) -> list[Cluster]:
        by_device: dict[torch.device | None, list[tuple[int, int, int]]] = {None: []}
        devices = self.devices
        for leaf, (low, form) in enumerate(zip(self.lows, self.forms)):
            if form.hull and form.code != BYTES:
                device = devices.get(leaf) if devices else None
                by_device.setdefault(device, []).append((low, low + form.hull, leaf))
        clusters: list[Cluster] = []
        for spans in by_device.values():
            spans.sort()
            if any(after[0] < before[1] for before, after in zip(spans, spans[1:])):
                clusters += clusters_of([Span(leaf, low, self.forms[leaf]) for low, _, leaf in spans])
        return clusters


class Memory:
    """The memory of one message, ready to leave. It keeps the leaves alive.

    Attributes:
        table: describes it to the receiver, in types that msgpack has.
        segments: flat uint8 tensors, each a transfer of its own.
        inline_bytes: size of the inline area.
    """

    def __init__(self, writer: MemoryWriter, threshold: int, clusters: list[Cluster]) -> None:
        self._leaves = writer.leaves
        self._forms = writer.forms
        self._lows = writer.lows
        self._devices = writer.devices
        self._clusters = clusters
        self.segments: list[torch.Tensor] = []
        sent = self._sent_forms()
        inline: list[tuple[int, int, int]] = []
        gathered: dict[torch.device, list[tuple[int, int, int]]] = {}
        owners: list[int | list[int]] = []
        for buffer, nbytes, group in self._buffers(sent):
            device = self._devices.get(self._first_leaf(buffer)) if self._devices else None
            if nbytes >= threshold:
                owners.append(buffer)
                self.segments.append(self._flat(buffer))
            elif device is None:
                inline.append((buffer, nbytes, group))
            else:
                gathered.setdefault(device, []).append((buffer, nbytes, group))
        for device, buffers in gathered.items():
            owners.append([buffer for buffer, _, _ in buffers])
            self.segments.append(self._gathered(device, Places(buffers)))
        self._places = Places(inline)
        self.inline_bytes = self._places.nbytes
        numbers: dict[Form, int] = {}
        leaves = [numbers.setdefault(form, len(numbers)) for form in sent]
        self.table: list[Any] = [
            [form.wire() for form in numbers],
            leaves,
            [cluster.wire() for cluster in clusters],
            owners,
        ]

    def _sent_forms(self) -> list[Form]:
        """The forms that the receiver shall give to the leaves."""
        if not self._clusters:
            return [form.packed() for form in self._forms]
        kept: dict[int, Form] = {}
        for cluster in self._clusters:
            kept.update((leaf, cluster.forms.get(leaf, self._forms[leaf])) for leaf, _ in cluster.members)
        return [kept[leaf] if leaf in kept else form.packed() for leaf, form in enumerate(self._forms)]

    def _buffers(self, sent: list[Form]) -> list[tuple[int, int, int]]:
        """All that is not empty: number, bytes, and the code with which it is gathered."""
        if not self._clusters:
            return [(leaf, form.hull, form.group) for leaf, form in enumerate(sent) if form.hull]
        shared = {leaf for cluster in self._clusters for leaf, _ in cluster.members}
        alone = [
            (leaf, form.hull, form.group) for leaf, form in enumerate(sent) if form.hull and leaf not in shared
        ]
        return alone + [
            (len(sent) + number, cluster.nbytes(sent), -1) for number, cluster in enumerate(self._clusters)
        ]

    def _first_leaf(self, buffer: int) -> int:
        number = buffer - len(self._leaves)
        return buffer if number < 0 else self._clusters[number].members[0][0]

    # -- bytes ---------------------------------------------------------------------------------------------------------

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
                start = self._copy(buffer, target, start)
        for start, _, buffer in places.singles:
            self._copy(buffer, target, start)
        for start, end in places.gaps():
            clear_memory(target + start, 0, end - start)

    def _copy(self, buffer: int, target: int, start: int) -> int:
        """Copy one buffer into the inline area; returns where it ends there."""
        low, nbytes = self._address(buffer)
        if low is not None:
            copy_memory(target + start, low, nbytes)
        else:
            with Ordinary():
                packed = self._flat(buffer)
            nbytes = packed.numel()
            copy_memory(target + start, packed.data_ptr(), nbytes)
        return start + nbytes

    def _gather(self, buffers: list[int], window: torch.Tensor) -> None:
        """Small tensors of one dtype, one after the other."""
        parts = [self._leaves[buffer] for buffer in buffers]
        if any(len(self._forms[buffer].shape) != 1 for buffer in buffers):
            parts = list(map(torch.Tensor.ravel, parts))
        torch.cat(parts, out=window)

    def _gathered(self, device: torch.device, places: Places) -> torch.Tensor:
        area = torch.zeros(places.nbytes, dtype=torch.uint8, device=device)
        for code, start, end, buffers in places.groups:
            self._gather(buffers, area[start:end].view(dtypes.BY_CODE[code]))
        for start, end, buffer in places.singles:
            area[start:end].copy_(self._flat(buffer))
        return area

    def _address(self, buffer: int) -> tuple[int | None, int]:
        """Where on the CPU a buffer lies as it travels, None if it lies nowhere; and its bytes."""
        number = buffer - len(self._leaves)
        if number >= 0:
            cluster = self._clusters[number]
            return None if cluster.padding else cluster.low, cluster.extent
        form = self._forms[buffer]
        return self._lows[buffer] if form.packed() is form else None, form.hull

    def _flat(self, buffer: int) -> torch.Tensor:
        """A buffer as bytes on its device: its own memory wherever that is possible."""
        number = buffer - len(self._leaves)
        if number >= 0:
            return self._flat_cluster(self._clusters[number])
        form = self._forms[buffer]
        if form.packed() is not form:
            return self._packed(buffer)
        storage, offset = self._storage(buffer)
        return words(storage, offset, (), form.hull, 1)

    def _storage(self, leaf: int) -> tuple[torch.UntypedStorage, int]:
        """Memory that holds a leaf, and where in it the lowest byte of the leaf is."""
        obj, low = self._leaves[leaf], self._lows[leaf]
        if isinstance(obj, torch.Tensor):
            storage = obj.untyped_storage()
            return storage, low - storage.data_ptr()
        return bytes_at(low, self._forms[leaf].hull).untyped_storage(), 0

    def _packed(self, leaf: int) -> torch.Tensor:
        """The bytes that a leaf shows, without the gaps, in the order in which they are in memory."""
        form = self._forms[leaf]
        storage, offset = self._storage(leaf)
        jumps, run, _ = form.axes
        align = word(self._lows[leaf], offset, jumps, run)
        return words(storage, offset, jumps, run, align).contiguous().view(torch.uint8).view(-1)

    def _flat_cluster(self, cluster: Cluster) -> torch.Tensor:
        leaves = [leaf for leaf, _ in cluster.members]
        if cluster.low is not None:
            whole = self._stretch(leaves, cluster.low, cluster.extent - cluster.padding)
            if not cluster.padding:
                return whole
            return torch.cat([whole.new_zeros(cluster.padding), whole])
        device = self._devices.get(leaves[0], torch.device("cpu"))
        flat = torch.zeros(cluster.nbytes(self._forms), dtype=torch.uint8, device=device)
        if cluster.scattered:
            places, _ = packed_places([self._forms[leaf] for leaf in leaves])
            for leaf, place in zip(leaves, places):
                packed = self._packed(leaf)
                flat[place : place + packed.numel()].copy_(packed)
            return flat
        for leaf, place in cluster.members:
            self._squeeze_into(flat, place, leaf, cluster.forms[leaf])
        return flat

    def _squeeze_into(self, flat: torch.Tensor, place: int, leaf: int, target: Form) -> None:
        form = self._forms[leaf]
        steps = [
            (extent, abs(old), abs(new))
            for extent, old, new in zip(form.shape, form.strides, target.strides)
            if extent > 1 and old
        ]
        storage, offset = self._storage(leaf)
        sources = [(extent, old) for extent, old, _ in steps]
        targets = [(extent, new) for extent, _, new in steps]
        align = word(self._lows[leaf], offset, [*sources, *targets, (1, place)], form.itemsize)
        source = words(storage, offset, sources, form.itemsize, align)
        words(flat.untyped_storage(), place, targets, form.itemsize, align).copy_(source)

    def _stretch(self, leaves: Sequence[int], low: int, nbytes: int) -> torch.Tensor:
        """Memory from an address on, all of which the leaves show or lie around."""
        if self._devices.get(leaves[0]) is None:
            return bytes_at(low, nbytes)
        for leaf in leaves:
            storage, _ = self._storage(leaf)
            offset = low - storage.data_ptr()
            if offset >= 0 and offset + nbytes <= storage.nbytes():
                return words(storage, offset, (), nbytes, 1)
        raise EncodeError("accelerator tensors overlap across storages", hint="send copies of them")
