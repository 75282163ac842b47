"""Large CPU buffers on huge pages: filling fresh memory is otherwise bound by page faults."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

# Below this the C library reuses memory, and page faults do not matter.
HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def empty(nbytes: int) -> torch.Tensor:
    """Uninitialised CPU memory of ``nbytes``, flat uint8.

    >>> empty(10).shape
    torch.Size([10])
    """
    # Named, since a program may have set another default device.
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes >= HUGE_BYTES and _libc is not None:
        page = mmap.PAGESIZE
        first = -(-tensor.data_ptr() // page) * page
        last = (tensor.data_ptr() + nbytes) // page * page
        # Advice only: a kernel without huge pages refuses, and the memory is as good as before.
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
    return tensor
