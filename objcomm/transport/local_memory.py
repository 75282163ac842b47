"""Reading the memory of another process of this host, where the kernel lets us: ``process_vm_readv``."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable

from .local_shared import Shared

# After each piece the reader looks whether it is still wanted.
_PIECE_BYTES = 64 << 20
# One core does not use up the bandwidth of the memory. From so many bytes on it pays to start threads, a fraction of
# a millisecond, and pieces of this size are shared out.
SHARED_FROM = 8 << 20
_SHARE_BYTES = 2 << 20


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


def read(
    pid: int,
    address: int,
    into: int,
    nbytes: int,
    keep_on: Callable[[], None] = lambda: None,
    *,
    threads: int = 1,
) -> None:
    """Copy ``nbytes`` at ``address`` of process ``pid`` to the address ``into`` of this one.

    Other threads run meanwhile, and ``threads`` of them, this one included, share the work if there is much of it.
    ``keep_on`` is called in this thread now and then, and ends it by raising. When this returns or raises, nothing is
    written any more.

    Raises:
        OSError: the kernel does not allow it, there is no such process, or nothing is mapped there.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv")
    if threads > 1 and nbytes >= SHARED_FROM:
        Shared(functools.partial(_copy, pid, address, into), nbytes, _SHARE_BYTES).run(threads, keep_on)
        return
    for start in range(0, nbytes, _PIECE_BYTES):
        if start:
            keep_on()
        _copy(pid, address, into, start, min(nbytes, start + _PIECE_BYTES))


def _copy(pid: int, address: int, into: int, start: int, end: int) -> None:
    assert _readv is not None
    here, there = _Span(), _Span()
    while start < end:
        here.base, there.base = into + start, address + start
        here.length = there.length = end - start
        got = _readv(pid, here, 1, there, 1, 0)
        if got <= 0:
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))
        start += got


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
