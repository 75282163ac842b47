"""Random objects for the soak, and a checksum of what they are: types, order, values, dtypes, shapes and sharing."""

from __future__ import annotations

import enum
import random
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
_ARRAY_DTYPES = ["<f4", "<f8", "<i8", ">i2", "|u1"]
# Bytes of a tensor, and how often: in the head, in a remainder of it, in a segment of its own.
_SIZES = [(64, 60), (4 << 10, 20), (100 << 10, 12), (700 << 10, 6), (5 << 20, 2)]


@dataclass
class Record:
    """A dataclass, which travels by its fields."""

    name: str
    items: list[Any]


class Place(NamedTuple):
    """A namedtuple."""

    left: Any
    right: Any


class Colour(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = "blue"


class Ordinary:
    """A class of the program's own, which is pickled."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def random_tensor(rng: random.Random) -> torch.Tensor:
    """A tensor of a random dtype, size and layout."""
    (nbytes,) = rng.choices([size for size, _ in _SIZES], [weight for _, weight in _SIZES])
    nbytes = rng.randint(0, nbytes) if rng.random() < 0.5 else nbytes
    dtype = rng.choice(_DTYPES)
    count = nbytes // dtype.itemsize
    flat = torch.from_numpy(np.frombuffer(rng.randbytes(4096), dtype=np.uint8).copy())
    memory = flat.repeat(-(-count * dtype.itemsize // 4096) or 1)[: count * dtype.itemsize]
    memory = memory & 1 if dtype is torch.bool else memory
    tensor = memory.clone().view(dtype)
    rows = rng.choice([1, 2, 8])
    layout = rng.randrange(5)
    if layout == 0 and count % rows == 0:
        return tensor.view(rows, count // rows).t()
    if layout == 1 and count > 4:
        return tensor[1::2]
    if layout == 2 and dtype.is_floating_point:
        return tensor.requires_grad_()
    return tensor


def random_object(rng: random.Random, depth: int = 3, *, plain: bool = False) -> Any:
    """An object of containers, values, tensors and arrays; without ``plain`` of user classes and functions too."""
    if depth == 0 or rng.random() < 0.25:
        return _leaf(rng, plain)
    inner = [random_object(rng, depth - 1, plain=plain) for _ in range(rng.randint(0, 4))]
    kind = rng.randrange(9)
    if kind < 3:
        return {_key(rng, index): item for index, item in enumerate(inner)}
    if kind == 3:
        return tuple(inner)
    if kind == 4:
        return Record(f"record {len(inner)}", inner)
    if kind == 5:
        return Place(inner, rng.random())
    if kind == 6:
        return OrderedDict((index, item) for index, item in enumerate(inner))
    if kind == 7 and not plain:
        return Ordinary(parts=inner, number=rng.randrange(100))
    if kind == 8:
        # One tensor twice, and a view of its memory beside it.
        tensor = random_tensor(rng).detach()
        return [tensor, *inner, tensor, tensor.reshape(-1)[: tensor.numel() // 2] if tensor.is_contiguous() else None]
    return inner


def _key(rng: random.Random, index: int) -> Any:
    return rng.choice([index, f"key {index}", (index, "tuple"), float(index)])


def _leaf(rng: random.Random, plain: bool) -> Any:
    kind = rng.randrange(12)
    if kind < 5:
        return random_tensor(rng)
    if kind == 5:
        array = np.frombuffer(rng.randbytes(64 * rng.randint(0, 30)), dtype=np.uint8).copy()
        return array.view(rng.choice(_ARRAY_DTYPES))
    if kind == 6 and not plain:
        offset = rng.randrange(1000)
        return lambda x: x + offset
    values: list[Callable[[], Any]] = [
        lambda: rng.randrange(-(1 << 70), 1 << 70),
        lambda: rng.choice([None, True, False, ..., 0.1, float("inf"), -0.0, 2 + 3j, Colour.RED, Colour.BLUE]),
        lambda: "\u00fc" * rng.randrange(200),
        lambda: rng.randbytes(rng.choice([0, 10, 3000, 90_000])),
        lambda: {rng.randrange(50) for _ in range(5)},
        lambda: list(range(rng.randrange(300))),
    ]
    return rng.choice(values)()


def checksum(obj: Any) -> int:
    """A number that depends on all that a transfer promises to keep."""
    return _Sum().of(obj)


class _Sum:
    def __init__(self) -> None:
        # Tensors and arrays by identity: one that stands at two places must do so on the other side.
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []

    def of(self, obj: Any) -> int:
        kind = type(obj).__qualname__.encode()
        if isinstance(obj, torch.Tensor | np.ndarray):
            before = self._met.get(id(obj))
            if before is not None:
                return _mix(kind, before)
            self._met[id(obj)] = len(self._met)
            self._alive.append(obj)
            return _tensor(obj) if isinstance(obj, torch.Tensor) else _array(obj)
        if isinstance(obj, dict):
            return _mix(kind, *[self.of(part) for item in obj.items() for part in item])
        if isinstance(obj, list | tuple):
            return _mix(kind, *[self.of(item) for item in obj])
        if isinstance(obj, set):
            return _mix(kind, *sorted(self.of(item) for item in obj))
        if isinstance(obj, Record | Ordinary):
            return _mix(kind, self.of(vars(obj)))
        if isinstance(obj, float):
            return zlib.crc32(struct.pack("<d", obj), zlib.crc32(kind))
        if isinstance(obj, bytes):
            return zlib.crc32(obj, zlib.crc32(kind))
        if callable(obj) and not isinstance(obj, enum.Enum):
            return _mix(kind, obj(7))
        return zlib.crc32(repr(obj).encode(), zlib.crc32(kind))


def _mix(kind: bytes, *parts: int) -> int:
    return zlib.crc32(repr(parts).encode(), zlib.crc32(kind))


def _tensor(tensor: torch.Tensor) -> int:
    about = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode()
    memory = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return zlib.crc32(memory.numpy().data, zlib.crc32(about))


def _array(array: Any) -> int:
    return zlib.crc32(array.tobytes(), zlib.crc32(f"{array.dtype.str} {array.shape}".encode()))
