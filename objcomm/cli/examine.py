"""The doctor's self-test: objects that hold a bit of everything, there and back between the ranks of the job."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import objcomm
from objcomm import transport

_ROUNDS = 10
_LARGE_BYTES = 16 << 20
# Up to here every pair of ranks is tried; beyond, those whose distance is a power of two.
_MOST_FOR_ALL = 32


def distances(world_size: int) -> list[int]:
    """How far apart the ranks are that are tried, in the order in which all ranks try them.

    >>> distances(4), distances(64)
    ([1, 2, 3], [1, 2, 4, 8, 16, 32])
    """
    if world_size <= _MOST_FOR_ALL:
        return list(range(1, world_size))
    return [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]


def pairs(rank: int, world_size: int, device: str | None, timeout: float) -> list[dict[str, Any]]:
    """Send to and receive from other ranks, all at once, and tell of each rank from which something came:

    ``src``, ``dst``, ``way`` (the transport, and why), ``microseconds`` that a small object takes,
    ``mib_per_second`` of a large tensor, ``error`` (``None`` if what arrived is what was sent).
    """
    return [
        _try((rank - distance) % world_size, rank, (rank + distance) % world_size, device, timeout)
        for distance in distances(world_size)
    ]


def _try(src: int, me: int, dst: int, device: str | None, timeout: float) -> dict[str, Any]:
    found: dict[str, Any] = {"src": src, "dst": me, "way": None, "microseconds": None, "mib_per_second": None}
    try:
        arrived = _pass_on(_sample(me, device), src, dst, timeout)
        found["error"] = difference(_sample(src, device), arrived)
        small = [_timed({"step": number, "name": "doctor"}, src, dst, timeout) for number in range(_ROUNDS)]
        large = torch.zeros(_LARGE_BYTES, dtype=torch.uint8)
        _timed(large, src, dst, timeout)
        took = _timed(large, src, dst, timeout)
        found.update(microseconds=statistics.median(small) * 1e6, mib_per_second=_LARGE_BYTES / (1 << 20) / took)
    except (objcomm.ObjcommError, RuntimeError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["way"] = way(src)
    return found


def _pass_on(obj: Any, src: int, dst: int, timeout: float) -> Any:
    arriving = objcomm.irecv_object(src, channel="doctor", timeout=timeout)
    leaving = objcomm.isend_object(obj, dst, channel="doctor", timeout=timeout)
    arrived = arriving.wait()
    leaving.wait()
    return arrived


def _timed(obj: Any, src: int, dst: int, timeout: float) -> float:
    start = time.perf_counter()
    _pass_on(obj, src, dst, timeout)
    return time.perf_counter() - start


def _sample(rank: int, device: str | None) -> dict[str, Any]:
    """The same object wherever it is made."""
    numbers = torch.arange(300_000, dtype=torch.float32) + rank
    small = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    sample = {
        "rank": rank,
        "name": "tést",
        "nested": [(1, 2.5, None), {"set": {1, 2}, 7: b"bytes"}, range(rank)],
        "large": numbers,
        "small": [small.t(), small > 3, small[0, :0]],
    }
    if device is not None:
        sample["device"] = torch.arange(600_000, device=device) + rank
    return sample


def difference(sent: Any, arrived: Any, path: str = "obj") -> str | None:
    """Where what arrived is not what was sent, or ``None``."""
    if type(sent) is not type(arrived):
        return f"{path} is a {type(arrived).__name__} and was a {type(sent).__name__}"
    if isinstance(sent, torch.Tensor):
        same = sent.dtype == arrived.dtype and sent.shape == arrived.shape and sent.stride() == arrived.stride()
        return None if same and torch.equal(sent.cpu(), arrived.cpu()) else f"{path} is another tensor"
    if isinstance(sent, (list, tuple, dict)) and len(sent) == len(arrived):
        if isinstance(sent, dict):
            if list(sent) != list(arrived):
                return f"{path} has other keys"
            parts = [(key, sent[key], arrived[key]) for key in sent]
        else:
            parts = [(index, *both) for index, both in enumerate(zip(sent, arrived, strict=True))]
        found = (difference(before, after, f"{path}[{key!r}]") for key, before, after in parts)
        return next(filter(None, found), None)
    return None if sent == arrived else f"{path} is {arrived!r} and was {sent!r}"


def way(peer: int) -> str:
    """The transport between this rank and a peer, and why it is that one."""
    group = dist.group.WORLD
    assert group is not None
    describe = getattr(transport, "describe", None)
    if describe is not None:
        return str(describe(group, dist.get_group_rank(group, peer)))
    return f"over the process group: {dist.get_backend_config(group)}"
