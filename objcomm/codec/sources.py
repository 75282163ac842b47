"""The leaves of a message at the sender, and the bytes of each buffer that travels."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..errors import EncodeError
from . import dtypes
from .address import bytes_at, copy_memory, word, words
from .form import Form
from .ordinary import Ordinary
from .overlap import Cluster, packed_places
from .placing import Buffers, Places


class Sources:
    """Buffers by number: a leaf that is in no cluster is one, numbered like the leaf; the clusters follow.

    Args:
        leaves: tensors, arrays and memoryviews.
        forms: of each leaf its form.
        lows: of each leaf the address of its lowest byte.
        devices: of each leaf that is not on the CPU its device.
        clusters: what of the leaves shares memory.
        sent: of each leaf the form that it shall have at the receiver: ``forms`` itself if each leaf is a buffer
            without gaps. None to find out.
    """

    def __init__(
        self,
        leaves: list[Any],
        forms: list[Form],
        lows: list[int],
        devices: dict[int, torch.device],
        clusters: list[Cluster],
        sent: list[Form] | None = None,
    ) -> None:
        self.leaves = leaves
        self.clusters = clusters
        self.devices = devices
        self._forms = forms
        self._lows = lows
        self.sent = self._sent_forms() if sent is None else sent

    def _sent_forms(self) -> list[Form]:
        """The forms that the receiver shall give to the leaves."""
        if not self.clusters:
            packed = {form: form.packed() for form in set(self._forms)}
            return self._forms if all(map(is_, packed, packed.values())) else [packed[form] for form in self._forms]
        kept: dict[int, Form] = {}
        for cluster in self.clusters:
            kept.update((leaf, cluster.forms.get(leaf, self._forms[leaf])) for leaf, _ in cluster.members)
        return [kept[leaf] if leaf in kept else form.packed() for leaf, form in enumerate(self._forms)]

    def buffers(self) -> Buffers:
        """All that is not empty."""
        numbers: Sequence[int] = range(len(self.sent))
        sizes = [form.hull for form in self.sent]
        groups = [form.group for form in self.sent]
        if self.clusters or 0 in sizes:
            shared = {leaf for cluster in self.clusters for leaf, _ in cluster.members}
            numbers = [leaf for leaf in numbers if sizes[leaf] and leaf not in shared]
            sizes = [sizes[leaf] for leaf in numbers]
            groups = [groups[leaf] for leaf in numbers]
            numbers += range(len(self.sent), len(self.sent) + len(self.clusters))
            sizes += [cluster.nbytes(self.sent) for cluster in self.clusters]
            groups += [-1] * len(self.clusters)
        return Buffers(numbers, sizes, groups)

    def device(self, buffer: int) -> torch.device | None:
        """Where a buffer is, None for the CPU."""
        if not self.devices:
            return None
        number = buffer - len(self.leaves)
        return self.devices.get(buffer if number < 0 else self.clusters[number].members[0][0])

    def segments(self, buffers: Buffers, threshold: int) -> tuple[list[int | list[int]], list[torch.Tensor], Buffers]:
        """Make segments of what is large or on an accelerator: who is in each, their bytes, and the buffers left."""
        owners: list[int | list[int]] = []
        segments: list[torch.Tensor] = []
        small: dict[torch.device | None, list[tuple[int, int, int]]] = {}
        for buffer, nbytes, group in zip(*buffers, strict=True):
            if nbytes >= threshold:
                owners.append(buffer)
                segments.append(self.flat(buffer))
            else:
                small.setdefault(self.device(buffer), []).append((buffer, nbytes, group))
        inline = small.pop(None, [])
        for device, gathered in small.items():
            owners.append([buffer for buffer, _, _ in gathered])
            segments.append(self._gathered(device, Places(Buffers.of(gathered))))
        return owners, segments, Buffers.of(inline)

    def _gathered(self, device: torch.device | None, places: Places) -> torch.Tensor:
        area = torch.zeros(places.nbytes, dtype=torch.uint8, device=device)
        for code, start, end, buffers in places.groups:
            flat = all(len(self.sent[buffer].shape) == 1 for buffer in buffers)
            self.gather(buffers, area[start:end].view(dtypes.BY_CODE[code]), flat)
        for start, end, buffer in places.singles:
            area[start:end].copy_(self.flat(buffer))
        return area

    def gather(self, buffers: Sequence[int], window: torch.Tensor, flat: bool) -> None:
        """Small tensors of one dtype, one after the other. ``flat``: each of them has one axis."""
        parts = list(map(self.leaves.__getitem__, buffers))
        torch.cat(parts if flat else list(map(torch.Tensor.ravel, parts)), out=window)

    def copy(self, places: list[tuple[int, int]], target: int) -> None:
        """Copy buffers into the inline area, each to its place."""
        lows, forms = self._lows, self._forms
        if self.sent is forms:
            for buffer, start in places:
                copy_memory(target + start, lows[buffer], forms[buffer].hull)
            return
        for buffer, start in places:
            low, nbytes = self._address(buffer)
            if low is not None:
                copy_memory(target + start, low, nbytes)
                continue
            with Ordinary():
                packed = self.flat(buffer)
            copy_memory(target + start, packed.data_ptr(), packed.numel())

    def _address(self, buffer: int) -> tuple[int | None, int]:
        """Where on the CPU a buffer lies as it travels, None if it lies nowhere; and its bytes."""
        number = buffer - len(self.leaves)
        if number >= 0:
            cluster = self.clusters[number]
            return None if cluster.padding else cluster.low, cluster.extent
        form = self._forms[buffer]
        return self._lows[buffer] if form.packed() is form else None, form.hull

    def flat(self, buffer: int) -> torch.Tensor:
        """A buffer as bytes on its device: its own memory wherever that is possible."""
        number = buffer - len(self.leaves)
        if number >= 0:
            return self._flat_cluster(self.clusters[number])
        form = self._forms[buffer]
        if form.packed() is not form:
            return self._packed(buffer)
        storage, offset = self._storage(buffer)
        return words(storage, offset, (), form.hull, 1)

    def _storage(self, leaf: int) -> tuple[torch.UntypedStorage, int]:
        """Memory that holds a leaf, and where in it the lowest byte of the leaf is."""
        obj, low = self.leaves[leaf], self._lows[leaf]
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
        device = self.devices.get(leaves[0], torch.device("cpu"))
        flat = torch.zeros(cluster.nbytes(self._forms), dtype=torch.uint8, device=device)
        if cluster.scattered:
            places, _ = packed_places([self._forms[leaf] for leaf in leaves])
            for leaf, place in zip(leaves, places, strict=True):
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
            for extent, old, new in zip(form.shape, form.strides, target.strides, strict=True)
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
        if self.devices.get(leaves[0]) is None:
            return bytes_at(low, nbytes)
        for leaf in leaves:
            storage, _ = self._storage(leaf)
            offset = low - storage.data_ptr()
            if offset >= 0 and offset + nbytes <= storage.nbytes():
                return words(storage, offset, (), nbytes, 1)
        raise EncodeError("accelerator tensors overlap across storages", hint="send copies of them")
