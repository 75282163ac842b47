"""Leaves through MemoryWriter and MemoryReader and back, and what they show of memory, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from objcomm.codec import arrays, tensors
from objcomm.codec.memory import Memory, MemoryReader, MemoryWriter

MAX_BYTES = 1 << 32

_DTYPES = [torch.float32, torch.uint8, torch.int16, torch.float64, torch.complex64]


def take_apart(objs: Sequence[Any], threshold: int = 1 << 19) -> tuple[Memory, torch.Tensor]:
    """The memory of leaves and its inline area, which lies in a larger block, as in a frame."""
    writer = MemoryWriter(threshold)
    for obj in objs:
        if isinstance(obj, torch.Tensor):
            assert tensors.is_plain(obj)
            writer.add_tensor(obj)
        elif isinstance(obj, np.ndarray):
            assert arrays.is_plain(obj)
            writer.add_array(obj)
        else:
            writer.add_bytes(obj)
    memory = writer.finish()
    frame = torch.full((memory.inline_bytes + 192,), 0xAA, dtype=torch.uint8)
    inline = frame[64 : 64 + memory.inline_bytes]
    memory.write_inline(inline)
    assert bool((frame[:64] == 0xAA).all() and (frame[64 + memory.inline_bytes :] == 0xAA).all())
    return memory, inline


def reader_of(memory: Memory, table: Any = None, max_bytes: int = MAX_BYTES) -> MemoryReader:
    segments = [(segment.numel(), tensors.on_accelerator(segment.device)) for segment in memory.segments]
    return MemoryReader(
        memory.table if table is None else table,
        inline_bytes=memory.inline_bytes,
        segments=segments,
        max_bytes=max_bytes,
    )


def through(objs: Sequence[Any], threshold: int = 1 << 19, device: torch.device | None = None) -> list[Any]:
    memory, inline = take_apart(objs, threshold)
    return reader_of(memory).build(inline, [segment.clone() for segment in memory.segments], device)


def bytes_sent(objs: Sequence[Any]) -> int:
    """Bytes of tensors and arrays that travel, without any that only align others."""
    memory, _ = take_apart(objs, threshold=1)
    assert memory.inline_bytes == 0
    return sum(segment.numel() for segment in memory.segments)


def places(obj: Any) -> list[int]:
    """The address of every byte of every element, in the order of the elements."""
    if isinstance(obj, torch.Tensor):
        itemsize = obj.element_size()
        address, strides = obj.data_ptr(), [stride * itemsize for stride in obj.stride()]
    else:
        itemsize = obj.itemsize
        address, strides = obj.__array_interface__["data"][0], list(obj.strides)
    if 0 in obj.shape:
        return []
    found = np.array([address])
    for extent, stride in zip(obj.shape, strides, strict=True):
        found = (found[:, None] + np.arange(extent) * stride).ravel()
    found = (found[:, None] + np.arange(itemsize)).ravel()
    return [int(each) for each in found]


def bits(obj: Any) -> bytes:
    if isinstance(obj, torch.Tensor):
        flat = obj.detach().clone(memory_format=torch.contiguous_format).flatten()
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return bytes(obj.tobytes())


def assert_same_memory(sent: Sequence[Any], received: Sequence[Any]) -> None:
    """Same values, and two bytes that were one are one, two that were not are not."""
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for one, other in zip(sent, received, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert tuple(one.shape) == tuple(other.shape)
        assert bits(one) == bits(other)
        for mine, its in zip(places(one), places(other), strict=True):
            assert there.setdefault(mine, its) == its, "memory that was shared is not any more"
            assert back.setdefault(its, mine) == mine, "memory that was not shared is now"


def _view(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    typed = base.view(rng.choice(_DTYPES))
    for _ in range(20):
        shape = [rng.choice([1, 2, 3, 4, 1, 2, 3, 4, 5, 0]) for _ in range(rng.randint(0, 3))]
        strides = [rng.choice([0, 1, 2, 3, 4, 7, 8, 12, 16]) for _ in shape]
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True) if extent)
        if reach < typed.numel():
            return typed.as_strided(shape, strides, rng.randint(0, typed.numel() - reach - 1))
    return typed[:3]


def some_views(rng: random.Random) -> list[Any]:
    """Views of a few buffers, of every kind and in every relation to each other."""
    bases = [torch.randint(0, 255, (rng.choice([64, 256, 1024]),), dtype=torch.uint8) for _ in range(rng.randint(1, 3))]
    objs: list[Any] = []
    for _ in range(rng.randint(1, 8)):
        view = _view(rng, rng.choice(bases))
        if rng.random() < 0.3:
            array = view.numpy()
            objs.append(array[tuple(slice(None, None, rng.choice([1, 1, -1])) for _ in range(array.ndim)) or ...])
        else:
            objs.append(view)
    if rng.random() < 0.3:
        grid = bases[0].view(torch.float32).view(-1, 8)
        step = rng.randint(1, 3)
        objs += [grid[:, first : first + rng.randint(1, 3)] for first in range(0, 8, step)]
    return objs
