"""The objects that ``python -m objcomm bench`` sends: P1 to P8, from a small dict to many tiny tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ..codec import encode


@dataclass
class Frame:
    """A user's dataclass that holds a numpy array."""

    pixels: Any
    index: int
    source: str


@dataclass(frozen=True)
class Payload:
    """A named object to send.

    Attributes:
        name: what the command line calls it.
        title: what it is, in a few words.
        make: makes it, on every rank.
        foreign: it is of a user's file, so that nobody knows yet which methods can send it.
    """

    name: str
    title: str
    make: Callable[[], Any]
    foreign: bool = False


def small_dict() -> dict[str, Any]:
    return {
        "step": 1207,
        "micro_batch": 3,
        "name": "decoder.layers.11.self_attention",
        "scale": 0.125,
        "training": True,
        "lengths": [(7 * i) % 61 + 3 for i in range(32)],
    }


def nested_context() -> dict[str, Any]:
    return {"content": {"content": {"bias": torch.randn(4)}}, "mask": torch.ones(2, 4, dtype=torch.bool)}


def thirty_two_tensors() -> dict[str, Any]:
    tensors = {f"layer.{i}": torch.randn(128, 128) for i in range(32)}
    return {"tensors": tensors, "step": 4, "names": [f"layer.{i}" for i in range(32)]}


def one_tensor(mebibytes: int) -> dict[str, Any]:
    return {"hidden": torch.randn(mebibytes, 512, 512), "step": 4}


def nested_values() -> dict[str, Any]:
    """What describes the samples of a micro-batch: 10,200 numbers and strings in 4,800 lists and dicts."""
    samples = [
        {
            "name": f"sample-{i}",
            "span": [i, i + 5],
            "score": i / 7,
            "tokens": [(7 * i + k) % 5000 for k in range(8)],
            "tree": [[i, [i + 1, i + 2]], [i + 3, []]],
            "label": None,
        }
        for i in range(600)
    ]
    return {"samples": samples, "step": 1207}


def array_in_dataclass() -> Frame:
    import numpy as np

    return Frame(np.random.default_rng(0).random((2048, 1024)), 17, "camera-2")


def tiny_tensors() -> list[torch.Tensor]:
    return [torch.randn(16) for _ in range(1000)]


PAYLOADS = [
    Payload("P1", "small dict", small_dict),
    Payload("P2", "nested dict, 2 tensors", nested_context),
    Payload("P3", "32 tensors of 64 KiB", thirty_two_tensors),
    Payload("P4", "one tensor of 64 MiB", lambda: one_tensor(64)),
    Payload("P5", "one tensor of 256 MiB", lambda: one_tensor(256)),
    Payload("P6", "10,000 Python values", nested_values),
    Payload("P7", "16 MiB array in a dataclass", array_in_dataclass),
    Payload("P8", "1,000 tensors of 16", tiny_tensors),
]


def usual() -> list[Payload]:
    """Those that can be made here: P7 needs numpy."""
    without = [] if importlib.util.find_spec("numpy") else ["P7"]
    return [payload for payload in PAYLOADS if payload.name not in without]


def sent_bytes(obj: Any) -> int:
    """How many bytes objcomm sends for ``obj``, without the header of the frame.

    Raises:
        objcomm.EncodeError: it cannot be sent.

    >>> sent_bytes(torch.zeros(1 << 20)) // (1 << 20)
    4
    """
    encoded = encode(obj)
    return len(encoded.skeleton) + encoded.inline_bytes + sum(segment.numel() for segment in encoded.segments)


def as_numpy(obj: Any) -> Any:
    """``obj`` with a numpy array over the same memory in the place of every tensor in its containers and dataclasses.

    Raises:
        TypeError: numpy has no such array, as for bfloat16, sparse tensors, and those that require grad.

    >>> as_numpy({"x": [torch.ones(2)], "n": 3})
    {'x': [array([1., 1.], dtype=float32)], 'n': 3}
    """
    if isinstance(obj, torch.Tensor):
        try:
            return obj.numpy()
        except RuntimeError as error:
            raise TypeError(str(error).splitlines()[0]) from error
    if type(obj) is dict:
        return {key: as_numpy(value) for key, value in obj.items()}
    if type(obj) in (list, tuple):
        return type(obj)(map(as_numpy, obj))
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*map(as_numpy, obj))
    if is_dataclass(obj) and not isinstance(obj, type):
        return replace(obj, **{one.name: as_numpy(getattr(obj, one.name)) for one in fields(obj) if one.init})
    return obj
