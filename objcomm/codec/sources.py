"""The leaves of a message at the sender, and the bytes of each buffer that travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import EncodeError
from .address import bytes_at, copy_memory, word, words
from .form import Form
from .ordinary import Ordinary
from .overlap import Cluster, packed_places


class Sources:
    """Buffers by number: a leaf that is in no cluster is one, numbered like the leaf; the clusters follow.

    Args:
        leaves: tensors, arrays and memoryviews.
        forms: of each leaf its form.
        lows: of each leaf the address of its lowest byte.
        devices: of each leaf that is not on the CPU its device.
        clusters: what of the leaves shares memory.

    Attributes:
        sent: of each leaf the form that it shall have at the receiver.
    """

    def __init__(
        self,
        leaves: list[Any],
        forms: list[Form],
        lows: list[int],
        devices: dict[int, torch.device],
        clusters: list[Cluster],
    ) -> None:
        self.leaves = leaves
        self.clusters = clusters
        self._forms = forms
        self._lows = lows
        self._devices = devices
        self.sent = self._sent_forms()

    def _sent_forms(self) -> list[Form]:
        """The forms that the receiver shall give to the leaves."""
        if not self.clusters:
            return [form.packed() for form in self._forms]
        kept: dict[int, Form] = {}
        for cluster in self.clusters:
            kept.update((leaf, cluster.forms.get(leaf, self._forms[leaf])) for leaf, _ in cluster.members)
        return [kept[leaf] if leaf in kept else form.packed() for leaf, form in enumerate(self._forms)]

    def buffers(self) -> list[tuple[int, int, int]]:
        """All that is not empty: number, bytes, and the code with which it is gathered."""
        if not self.clusters:
            return [(leaf, form.hull, form.group) for leaf, form in enumerate(self.sent) if form.hull]
        shared = {leaf for cluster in self.clusters for leaf, _ in cluster.members}
        alone = [
            (leaf, form.hull, form.group) for leaf, form in enumerate(self.sent) if form.hull and leaf not in shared
        ]
        return alone + [
            (len(self.sent) + number, cluster.nbytes(self.sent), -1) for number, cluster in enumerate(self.clusters)
        ]

    def device(self, buffer: int) -> torch.device | None:
        """Where a buffer is, None for the CPU."""
        if not self._devices:
            return None
        number = buffer - len(self.leaves)
        return self._devices.get(buffer if number < 0 else self.clusters[number].members[0][0])

    def copy(self, buffer: int, target: int, start: int) -> int:
        """Copy one buffer into the inline area; returns where it ends there."""
        low, nbytes = self._address(buffer)
        if low is not None:
            copy_memory(target + start, low, nbytes)
        else:
            with Ordinary():
                packed = self.flat(buffer)
            nbytes = packed.numel()
            copy_memory(target + start, packed.data_ptr(), nbytes)
        return start + nbytes

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
        device = self._devices.get(leaves[0], torch.device("cpu"))
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
        if self._devices.get(leaves[0]) is None:
            return bytes_at(low, nbytes)
        for leaf in leaves:
            storage, _ = self._storage(leaf)
            offset = low - storage.data_ptr()
            if offset >= 0 and offset + nbytes <= storage.nbytes():
                return words(storage, offset, (), nbytes, 1)
        raise EncodeError("accelerator tensors overlap across storages", hint="send copies of them")
