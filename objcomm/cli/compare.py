"""What the demo's transfers cost, beside torch's own object calls with the same objects in the same run."""

from __future__ import annotations

import importlib.util
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
    """Median seconds that one object took one way, by method, and the bytes that objcomm sent for one.

    ``torch`` is ``None`` where numpy is not installed, which torch's object calls need.
    """

    objcomm: float
    torch: float | None
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


_METHODS: list[tuple[Send, Receive]] = [(_objcomm_send, _objcomm_receive)]
if importlib.util.find_spec("numpy") is not None:
    _METHODS.append((_torch_send, _torch_receive))


def time_both(objects: Sequence[Any], peer: int) -> Timing:
    """Send the objects there and back by either method in turns; half of a round trip is one way.

    Called on the rank that has the objects, while its peer calls :func:`echo` with as many.
    """
    times: list[list[float]] = [[] for _ in _METHODS]
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
    medians = [statistics.median(seconds) for seconds in times]
    return Timing(medians[0], medians[1] if len(medians) > 1 else None, nbytes)


def echo(peer: int) -> None:
    """Send back whatever :func:`time_both` on the peer sends."""
    for turn in range(_WARM_UP + _ROUNDS):
        for method in _order(turn):
            send, receive = _METHODS[method]
            dist.barrier()
            send(receive(peer), peer)


def _order(turn: int) -> list[int]:
    order = list(range(len(_METHODS)))
    return order if turn % 2 == 0 else order[::-1]
