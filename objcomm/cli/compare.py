"""What the demo's transfers cost, beside torch's own object calls with the same objects in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import objcomm

_ROUNDS = 60
_WARM_UP = 2

Send = Callable[[Any, int], None]
Receive = Callable[[int], Any]


@dataclass(frozen=True)
class Timing:
    """Median seconds that one object took one way, by method, and the bytes that objcomm sent for one."""

    objcomm: float
    torch: float
    nbytes: int


def _torch_send(obj: Any, dst: int) -> None:
    dist.send_object_list([obj], dst)


def _torch_receive(src: int) -> Any:
    box = [None]
    dist.recv_object_list(box, src)
    return box[0]


def _objcomm_send(obj: Any, dst: int) -> None:
    objcomm.send_object(obj, dst, channel="compare")


def _objcomm_receive(src: int) -> Any:
    return objcomm.recv_object(src, channel="compare")


_METHODS: list[tuple[Send, Receive]] = [(_objcomm_send, _objcomm_receive), (_torch_send, _torch_receive)]


def time_both(objects: Sequence[Any], peer: int) -> Timing:
    """Send the objects there and back by either method in turns; half of a round trip is one way.

    Called on the rank that has the objects, while its peer calls :func:`echo` with as many.
    """
    times: list[list[float]] = [[], []]
    before = objcomm.stats()["bytes_sent"]
    for turn in range(_WARM_UP + _ROUNDS):
        for method in _order(turn):
            send, receive = _METHODS[method]
            dist.barrier()
            start = time.perf_counter()
            send(objects[turn % len(objects)], peer)
            receive(peer)
            if turn >= _WARM_UP:
                times[method].append((time.perf_counter() - start) / 2)
    nbytes = (objcomm.stats()["bytes_sent"] - before) // (_WARM_UP + _ROUNDS)
    return Timing(statistics.median(times[0]), statistics.median(times[1]), nbytes)


def echo(peer: int) -> None:
    """Send back whatever :func:`time_both` on the peer sends."""
    for turn in range(_WARM_UP + _ROUNDS):
        for method in _order(turn):
            send, receive = _METHODS[method]
            dist.barrier()
            send(receive(peer), peer)


def _order(turn: int) -> tuple[int, int]:
    return (0, 1) if turn % 2 == 0 else (1, 0)
