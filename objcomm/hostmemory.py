"""CPU tensors seen as memoryviews, without numpy and without a copy."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, cast

import torch

from .errors import UsageError

# From CPython's C interface: a memoryview over an address. (ctypes arrays would do, but ctypes keeps a type
# for every length for ever.)
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable.

    The view does not keep the tensor alive: whoever holds it holds the tensor too.

    >>> tensor = torch.tensor([1, 2], dtype=torch.uint8)
    >>> bytes(view_of(tensor))
    b'\\x01\\x02'
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    address = tensor.data_ptr()
    if not address or tensor.device.type == "meta":
        raise UsageError(
            f"objcomm needs real memory, and torch gave it a {type(tensor).__name__} without any",
            hint="leave FakeTensorMode and other dispatch modes before objects are sent or received",
        )
    return cast(memoryview, _from_memory(address, nbytes, _WRITABLE))


class Frame(NamedTuple):
    """Memory of a head, as the transport and as the writer see it."""

    memory: torch.Tensor
    view: memoryview
    nbytes: int
    address: int

    @classmethod
    def of(cls, memory: torch.Tensor) -> Frame:
        """Flat uint8 memory on the CPU."""
        return cls(memory, view_of(memory), memory.numel(), memory.data_ptr())
