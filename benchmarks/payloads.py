"""The payloads that every benchmark uses: P1 to P8, from a small dict to many tiny tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Frame:
    """A user's dataclass that holds an array."""

    pixels: np.ndarray[Any, Any]
    index: int
    source: str


@dataclass(frozen=True)
class Payload:
    """A named object to send.

    Attributes:
        nbytes: of its tensors and arrays, for throughput and for the plain transfer of as many bytes.
    """

    name: str
    title: str
    make: Callable[[], Any]
    nbytes: int


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
    return Frame(np.random.default_rng(0).random((2048, 1024)), 17, "camera-2")


def tiny_tensors() -> list[torch.Tensor]:
    return [torch.randn(16) for _ in range(1000)]


MIB = 1 << 20
PAYLOADS = [
    Payload("P1", "small dict", small_dict, 300),
    Payload("P2", "nested dict, 2 tensors", nested_context, 24),
    Payload("P3", "32 tensors of 64 KiB", thirty_two_tensors, 2 * MIB),
    Payload("P4", "one tensor of 64 MiB", lambda: one_tensor(64), 64 * MIB),
    Payload("P5", "one tensor of 256 MiB", lambda: one_tensor(256), 256 * MIB),
    Payload("P6", "10,000 Python values", nested_values, 160_000),
    Payload("P7", "16 MiB array in a dataclass", array_in_dataclass, 16 * MIB),
    Payload("P8", "1,000 tensors of 16", tiny_tensors, 64_000),
]
