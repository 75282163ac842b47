"""Memory by its address: of buffers of Python, and as tensors of bytes. The owner must be kept alive by the caller."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import gcd
from typing import cast

import torch

_WRITABLE = 0x200
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

# So many buffers are copied one by one; for more, one call of torch for all of them pays, dear as it is to prepare.
FEW = 4

copy_memory = ctypes.memmove
clear_memory = ctypes.memset


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous memoryview are, read-only ones too. The view pins them there."""
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        _release_buffer(ctypes.byref(buffer))


def view_at(address: int, nbytes: int) -> memoryview:
    """A memoryview over memory of the CPU."""
    return cast(memoryview, _view_memory(address, nbytes, _WRITABLE))


def window_at(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over at least one byte of memory of the CPU."""
    return torch.frombuffer(view_at(address, nbytes), dtype=dtype)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over memory of the CPU."""
    return window_at(address, nbytes, torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def words(
    storage: torch.UntypedStorage, offset: int, jumps: Sequence[tuple[int, int]], run: int, align: int
) -> torch.Tensor:
    """``run`` bytes at each of the places that ``jumps``, pairs of extent and stride, reach, as integers.

    Two such tensors of the same ``run``, extents and ``align`` can be copied into each other; ``align`` is what
    :func:`word` says for both of them. The storage is bounds-checked by torch.
    """
    sizes = [extent for extent, _ in jumps]
    strides = [stride // align for _, stride in jumps]
    empty = torch.empty(0, dtype=_WORDS[align], device=storage.device)
    return empty.set_(storage, offset // align, [*sizes, run // align], [*strides, 1])


def word(address: int, offset: int, jumps: Sequence[tuple[int, int]], run: int) -> int:
    """The widest integer that fits all of the places at which memory is touched."""
    return gcd(8, address, offset, run, *(stride for _, stride in jumps))
