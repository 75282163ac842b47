"""What a transfer takes beside the object itself, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import objcomm

from .bench_methods import Bench
from .payloads import Payload

# Memory that the C library has kept would be used again, and its use would not count.
_trim: Callable[[int], int] | None = (
    getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
)


def peaks(bench: Bench, payload: Payload, nbytes: int) -> dict[str, int] | None:
    """By how many bytes the resident memory of the sender rises above the object that it has (``send``), and that of
    the receiver above the ``nbytes`` that it gets (``receive``), at their highest. ``None`` where the kernel does not
    tell.

    Memory of earlier receives is not used again meanwhile: it would not count.
    """
    if not all((can_tell(), bench.exchange(can_tell()))):
        return None
    pool = objcomm.settings().pool_bytes
    objcomm.configure(pool_bytes=0)
    try:
        obj = payload.make() if bench.rank == 0 else None
        rise = 0
        for _ in range(2):  # the first lets go of what has been kept, and makes what a connection needs
            bench.barrier()
            rise = _one(bench, obj)
    finally:
        objcomm.configure(pool_bytes=pool)
    mine = rise - (nbytes if bench.rank == 1 else 0)
    theirs = bench.exchange(mine)
    return {"send": mine, "receive": theirs} if bench.rank == 0 else {"send": theirs, "receive": mine}


def _one(bench: Bench, obj: Any) -> int:
    if bench.rank == 0:
        return peak_beyond(lambda: objcomm.send_object(obj, bench.peer))[0]
    return peak_beyond(lambda: objcomm.recv_object(bench.peer))[0]


def can_tell() -> bool:
    """Whether the kernel counts for us: it does on Linux, unless the process may not write to its own /proc."""
    try:
        peak_beyond(lambda: None)
    except OSError:
        return False
    return True


def peak_beyond(action: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes by which the resident memory of this process rose above its start while ``action`` ran, at its highest,
    and what ``action`` returned.

    Raises:
        OSError: the kernel does not tell, as anywhere but on Linux.
    """
    gc.collect()
    if _trim is not None:
        _trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    result = action()
    return _status("VmHWM") - before, result


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")
