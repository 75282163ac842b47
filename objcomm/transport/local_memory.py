"""Reading the memory of another process of this host, where the kernel lets us: ``process_vm_readv``."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable

# After each piece the reader looks whether it is still wanted.
_PIECE_BYTES = 64 << 20


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is None:
        return None
    function.restype = ctypes.c_ssize_t
    span = ctypes.POINTER(_Span)
    function.argtypes = (ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong)
    found: Callable[..., int] = function
    return found


_readv = _find()


def read(pid: int, address: int, into: int, nbytes: int, keep_on: Callable[[], None] = lambda: None) -> None:
    """Copy ``nbytes`` at ``address`` of process ``pid`` to the address ``into`` of this one.

    Other threads run meanwhile. ``keep_on`` is called now and then, and ends it by raising.

    Raises:
        OSError: the kernel does not allow it, there is no such process, or nothing is mapped there.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv")
    here, there = _Span(), _Span()
    done = 0
    while done < nbytes:
        here.base, there.base = into + done, address + done
        here.length = there.length = min(_PIECE_BYTES, nbytes - done)
        got = _readv(pid, here, 1, there, 1, 0)
        if got <= 0:
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
        done += got
        if done < nbytes:
            keep_on()


def readable(address: int, nbytes: int) -> bool:
    """Whether other processes can read this memory, as far as its first and last byte tell.

    Memory that a driver has mapped, as for pinned buffers, may be open to this process alone.
    """
    if _readv is None:
        return False
    got = ctypes.create_string_buffer(2)
    here = _Span(ctypes.addressof(got), 2)
    ends = (_Span * 2)(_Span(address, 1), _Span(address + nbytes - 1, 1))
    return _readv(os.getpid(), here, 1, ends, 2, 0) == 2


def why_not_read(pid: int, address: int, expected: bytes) -> str:
    """Why the memory of ``pid`` cannot be read from here; empty if ``expected`` was read at ``address``."""
    if pid <= 0:
        return "its process is not in this rank's pid namespace"
    got = ctypes.create_string_buffer(len(expected))
    try:
        read(pid, address, ctypes.addressof(got), len(expected))
    except OSError as error:
        return f"the kernel does not let this process read its memory ({errno.errorcode.get(error.errno or 0, error)})"
    return "" if got.raw == expected else "what its pid names here is another process"
