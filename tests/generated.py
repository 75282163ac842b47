"""Random objects of every kind, made from a seed."""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import random
import struct
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.values import Access, Box, Color, Config, Frozen, Level, NamedPair, Pair, Plain, Slotted, Triple


class Generator:
    """Makes one object.

    Args:
        seed: the same seed makes the same object.
        pickled: whether objects that have to be pickled may occur.
    """

    def __init__(self, seed: int, *, pickled: bool = True) -> None:
        self._random = random.Random(seed)
        self._pickled = pickled
        self._tensors: list[torch.Tensor] = []
        self._made: list[Any] = []
        self._budget = self._random.choice((3, 10, 40, 120))

    def make(self, depth: int = 0) -> Any:
        self._budget -= 1
        if depth > 6 or self._budget < 0 or self._random.random() < 0.25:
            return self._leaf()
        made = self._random.choice(self._containers)(self, depth + 1)
        self._made.append(made)
        return made

    def _several(self, depth: int) -> list[Any]:
        return [self.make(depth) for _ in range(self._random.randrange(5))]

    def _keyed(self, depth: int) -> list[tuple[Any, Any]]:
        return [(self._key(), self.make(depth)) for _ in range(self._random.randrange(5))]

    def _key(self) -> Any:
        if self._random.random() < 0.6:
            return self._text()
        choice = self._random.randrange(8)
        if choice == 0:
            return tuple(self._hashable() for _ in range(self._random.randrange(3)))
        if choice == 1:
            return frozenset(self._hashable() for _ in range(self._random.randrange(3)))
        if choice == 2:
            return Frozen(self._hashable())
        return self._hashable()

    def _hashable(self) -> Any:
        make = self._random.choice((self._integer, self._text, self._float, self._bytes, lambda: None, self._member))
        return make()

    def _integer(self) -> int:
        bits = self._random.choice((3, 7, 8, 16, 31, 32, 63, 64, 65, 200))
        return self._random.getrandbits(bits) * self._random.choice((1, -1))

    def _float(self) -> float:
        value: float = struct.unpack("d", self._random.randbytes(8))[0]
        return self._random.choice((0.0, -0.0, 1.5, float("inf"), value))

    def _text(self) -> str:
        return "".join(self._random.choice("abcü\u20ac\U0001f600\0\ud800") for _ in range(self._random.randrange(6)))

    def _bytes(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 5, 300)))

    def _member(self) -> Any:
        return self._random.choice((*Color, *Level, *Access, Access.READ | Access.WRITE))

    def _moment(self) -> Any:
        zone = self._random.choice((None, dt.timezone.utc, dt.timezone(dt.timedelta(minutes=90))))
        moment = dt.datetime(2000, 1, 1, 1, 2, 3, 4, zone) + dt.timedelta(days=self._random.randrange(9999))
        since = moment - dt.datetime(1999, 1, 1, tzinfo=zone)
        return self._random.choice((moment, moment.date(), moment.timetz(), since))

    def _value(self) -> Any:
        return self._random.choice(
            (
                *(True, ..., NotImplemented, int, torch.float16, torch.device("cuda:3"), torch.Size([1, 2])),
                *(1j, range(2, 9, 3), slice(1, None), bytearray(b"xy"), decimal.Decimal("1.20"), pathlib.Path("a/b")),
                *(uuid.UUID(int=7), np.float32(1.5), np.datetime64("2001-02-03"), np.dtype(">i4"), np.str_("x")),
            )
        )

    def _tensor(self) -> torch.Tensor:
        if self._tensors and self._random.random() < 0.4:
            known = self._random.choice(self._tensors)
            if known.numel() > 3 and known.dim() == 2 and self._random.random() < 0.7:
                known = self._random.choice((known[1:], known.t(), known[:, ::2], known[:1], known.diagonal()))
            return known
        dtype = self._random.choice((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64))
        shape = self._random.choice(((), (0,), (3,), (2, 3), (4, 4), (2, 0, 1), (1, 2, 3)))
        made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(self._random.randrange(99))).to(dtype)
        if self._random.random() < 0.2 and dtype.is_floating_point:
            made.requires_grad_()
        self._tensors.append(made)
        return made.detach() if made.requires_grad and self._random.random() < 0.5 else made

    def _array(self) -> Any:
        dtype = self._random.choice(("f4", ">i2", "?", "U3", "M8[s]", "c8"))
        array = np.zeros(self._random.choice(((), (0,), (3,), (2, 3))), dtype)
        return self._random.choice((array, array.T))

    def _leaf(self) -> Any:
        makers: list[Callable[[], Any]] = [
            *(self._integer, self._float, self._text, self._bytes, self._hashable, self._moment, self._value),
            *(self._tensor, self._array, lambda: None),
        ]
        return self._random.choice(makers)()

    def _again(self, depth: int) -> Any:
        """Something that is in the object already."""
        return self._random.choice(self._made) if self._made else self._leaf()

    def _object(self, depth: int) -> Any:
        if not self._pickled:
            return self._several(depth)
        return Plain(item=self.make(depth), items=self._several(depth))

    _containers: tuple[Callable[[Generator, int], Any], ...] = (
        _several,
        _several,
        lambda self, depth: tuple(self._several(depth)),
        lambda self, depth: dict(self._keyed(depth)),
        lambda self, depth: dict(self._keyed(depth)),
        lambda self, depth: OrderedDict(self._keyed(depth)),
        lambda self, depth: defaultdict(self._random.choice((list, None, int)), self._keyed(depth)),
        lambda self, depth: deque(self._several(depth), self._random.choice((None, 9))),
        lambda self, depth: {self._hashable() for _ in range(3)},
        lambda self, depth: frozenset(self._key() for _ in range(3)),
        lambda self, depth: Pair(self.make(depth), self.make(depth)),
        lambda self, depth: NamedPair(self.make(depth), 1),
        lambda self, depth: Triple(1, self.make(depth)),
        lambda self, depth: Config("c", self._several(depth), self.make(depth)),
        lambda self, depth: Slotted(self.make(depth), self.make(depth)),
        lambda self, depth: Box(self.make(depth)),
        _object,
        _again,
    )
