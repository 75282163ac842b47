"""Bytes that have arrived, and where tensors over them shall be."""

from __future__ import annotations

from typing import Any

import torch

from . import tensors
from .address import view_at, words
from .form import TINY

# Storage of torch starts at a multiple of 64; what uses wide instructions on it relies on no more than this.
ALIGN = 16

# From here on raw bytes are handed out without a copy, which takes numpy.
_LARGE = 1 << 16


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


class Block:
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

    def part(self, start: int, end: int) -> Block:
        part = Block.__new__(Block)
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

    def place(self) -> tuple[torch.UntypedStorage, int, int]:
        """Where tensors over the bytes shall be: memory, where in it the bytes start, and their address."""
        return self._whole.storage, self._whole.offset + self._start, self._whole.address + self._start

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
            if (whole.address + self._start) % ALIGN:
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
