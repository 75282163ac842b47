"""CPU memory for what is received, used again once nothing can see it any more.

Filling fresh memory is bound by page faults: 64 MiB take two to three times as long as into memory that was used
before. So a few blocks that were handed out stay known here, and are handed out again when they have come back: when
nobody holds the storage, neither a tensor, a view or an array over it, nor the storage object itself. A block whose
memory was exchanged by its user (resized, or moved into shared memory) is forgotten.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..config import settings
from . import hugepages

# Below this the C library keeps memory itself.
_SMALLEST = 256 << 10
# What waits for its next use when something of another size had to be allocated.
_IDLE_BYTES = 8 << 20

_C: Any = torch._C
_use_count: Callable[[int], int] | None = getattr(_C, "_storage_Use_Count", None)


class _Block:
    """Memory that was handed out, and what tells whether it has come back."""

    __slots__ = ("_address", "_at_rest", "_handle", "nbytes", "storage")

    def __init__(self, nbytes: int) -> None:
        self.storage = hugepages.empty(nbytes).untyped_storage()
        self.nbytes = nbytes
        self._address = self.storage.data_ptr()
        self._handle = self.storage._cdata
        self._at_rest = self._holders()

    def _holders(self) -> tuple[int, int, int]:
        """How many hold the storage: in torch, in Python, and weakly."""
        assert _use_count is not None
        return _use_count(self._handle), sys.getrefcount(self.storage), weakref.getweakrefcount(self.storage)

    @property
    def idle(self) -> bool:
        return self._holders() == self._at_rest

    @property
    def intact(self) -> bool:
        return self.storage.nbytes() == self.nbytes and self.storage.data_ptr() == self._address

    def memory(self, nbytes: int) -> torch.Tensor:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.set_(self.storage, 0, (nbytes,), (1,))


class Pool:
    """Blocks in the order of their last use.

    >>> pool = Pool()
    >>> first = pool.take(1 << 20, 1 << 22)
    >>> address = first.data_ptr()
    >>> second = pool.take(1 << 20, 1 << 22)
    >>> second.data_ptr() == address  # somebody has it
    False
    >>> del first
    >>> pool.take(1 << 20, 1 << 22).data_ptr() == address
    True
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, most: int) -> torch.Tensor:
        """Flat uint8 memory of ``nbytes``, uninitialised; blocks of ``most`` bytes together may stay known."""
        if _use_count is None or not _SMALLEST <= nbytes <= most:
            if self._blocks and not most:
                self._blocks.clear()
            return hugepages.empty(nbytes)
        with self._lock:
            blocks = self._blocks
            for place in range(len(blocks) - 1, -1, -1):
                block = blocks[place]
                # A block that is longer is kept alive as a whole.
                if nbytes <= block.nbytes <= nbytes + nbytes // 8 and block.idle and block.intact:
                    blocks.append(blocks.pop(place))
                    return block.memory(nbytes)
            self._make_room(most - nbytes)
            block = _Block(nbytes)
            blocks.append(block)
            return block.memory(nbytes)

    def _make_room(self, most: int) -> None:
        """Forget blocks, the longest unused first: idle ones, which are then freed, and what is beyond ``most``."""
        idle = known = 0
        kept: list[_Block] = []
        for block in reversed(self._blocks):
            resting = block.idle
            if known + block.nbytes > most or (resting and idle + block.nbytes > _IDLE_BYTES) or not block.intact:
                continue
            known += block.nbytes
            idle += block.nbytes if resting else 0
            kept.append(block)
        self._blocks[:] = reversed(kept)


_pool = Pool()


def take(nbytes: int) -> torch.Tensor:
    """Flat uint8 CPU memory of ``nbytes`` for something that is received."""
    return _pool.take(nbytes, settings().pool_bytes)
