"""Named values of every kind that objcomm carries. Each call's tests send all of them."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import math
import pathlib
import struct
import threading
import types
import uuid
import warnings
import zoneinfo
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

T = TypeVar("T")

Pair = collections.namedtuple("Pair", "left right")


class Triple(NamedTuple):
    first: int
    second: Any
    third: Any = None

    @property
    def total(self) -> Any:
        return self.first + self.second


class NamedPair(Pair):
    """A namedtuple with a method, as people write them."""

    __slots__ = ()

    def swapped(self) -> NamedPair:
        return NamedPair(self.right, self.left)


@dataclasses.dataclass
class Config:
    name: str
    layers: list[Any]
    extra: Any = None
    shared: ClassVar[list[int]] = [1]


@dataclasses.dataclass(frozen=True)
class Frozen:
    key: Any
    value: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    a: Any


@dataclasses.dataclass
class Child(Config):
    depth: dataclasses.InitVar[int] = 0
    computed: int = dataclasses.field(init=False, default=0)
    unset: int = dataclasses.field(init=False)

    def __post_init__(self, depth: int) -> None:
        self.computed = depth * 2


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


class Color(enum.Enum):
    RED = 1
    GREEN = "green"
    CRIMSON = 1  # noqa: PIE796  an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(str, enum.Enum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    EXECUTE = 4


class Mode(enum.IntFlag):
    A = 1
    B = 2


class MyList(list[Any]):
    pass


class MyDict(dict[Any, Any]):
    pass


class MyStr(str):
    pass


class MyInt(int):
    pass


class Plain:
    """An ordinary class: it has to be pickled."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> str:
        return "bound"


class WithSlots:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Reduced:
    """Says itself how it is pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.value,)

    def __repr__(self) -> str:
        return f"Reduced({self.value})"


class Problem(Exception):
    pass


class Labelled(torch.Tensor):
    """A tensor subclass without memory of its own."""


def function(x: int) -> int:
    return x + 1


def _of(value: Any, use: Callable[[Any], Any]) -> Any:
    return use(value)


def _nested(levels: int, make: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = make(value)
    return value


def _cyclic_list() -> list[Any]:
    value: list[Any] = [1]
    value.append({"self": value})
    return value


def _cyclic_object() -> Config:
    value = Config("loop", [])
    value.layers.append(value)
    return value


def _repeated() -> Any:
    value: Any = [1, 2, 3]
    for _ in range(40):
        value = [value, value]
    return value


def _ordered() -> OrderedDict[Any, Any]:
    value = OrderedDict(b=1, a=2)
    value.move_to_end("b")
    return value


def _child() -> Child:
    value = Child("child", [1], depth=3)
    value.unexpected = "attribute"  # type: ignore[attr-defined]
    return value


def _deleted_slot() -> Slotted:
    value = Slotted(1)
    del value.b
    return value


def _shared_object() -> list[Any]:
    inner = Plain(x=1)
    return [inner, {"again": inner}, Plain(inner=inner)]


def _closure() -> Callable[[], int]:
    captured = [1, 2]
    return lambda: sum(captured)


def _local_class() -> Any:
    class Local:
        def __init__(self) -> None:
            self.value = 5

    return Local()


PLAIN: list[tuple[str, Callable[[], object]]] = [
    ("none", lambda: None),
    ("bools", lambda: [True, False]),
    ("integers", lambda: [0, -1, 127, 128, -129, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1]),
    ("big integers", lambda: [2**64, -(2**63) - 1, 2**200, -(2**200), 10**400]),
    ("floats", lambda: [0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, 1e308]),
    ("nan", lambda: [math.nan, -math.nan, struct.unpack("d", struct.pack("Q", 0x7FF8DEADBEEF0001))[0]]),
    ("strings", lambda: ["", "ascii", "naïve \U0001f600", "nul \0 inside", "x" * 70_000]),
    ("lone surrogates", lambda: ["\ud800", "a\udfffb", {"\udc80": "\udc80"}]),
    ("bytes", lambda: [b"", b"\0\xff", b"x" * 300]),
    ("long bytes", lambda: {"a": bytes(range(256)) * 4096, "b": [b"y" * 700_000]}),
    ("bytearrays", lambda: [bytearray(), bytearray(b"abc"), {"k": (bytearray(b"x"),)}]),
    ("long bytearray", lambda: [bytearray(b"z") * 700_000]),
    ("bytearray under a tuple key", lambda: {(1, 2): [bytearray(b"x")], 3: {"a": bytearray(b"y")}}),
    ("list and tuple", lambda: [(), [], (1,), [1], ((2,), [(3, [4])])]),
    ("dict", lambda: {"z": 1, "a": [1, {"b": None}], "": {}}),
    ("dict order", lambda: {3: "c", 1: "a", 2: "b", "x": 0, None: 1, 1.5: 2, b"k": 3, False: 4}),
    ("dict with tuple keys", lambda: {(1, "a"): 1, ((2,), None): [2], (): 3, frozenset([1]): 4}),
    (
        "dict with other keys",
        lambda: {Color.RED: 1, Frozen(1): 2, Pair(1, 2): 3, 2**70: 4, 1j: 5, ...: 6, torch.int8: 7},
    ),
    ("nan as a key", lambda: {math.nan: 1}),
    ("sets", lambda: [set(), {1, "a", None, (1, 2)}, frozenset(), frozenset({frozenset({1}), 2**80})]),
    ("complex", lambda: [1j, complex(-0.0, math.nan), complex(math.inf, -0.0)]),
    ("ordered dict", _ordered),
    ("defaultdict", lambda: [defaultdict(list, {"a": [1]}), defaultdict(None, {(1,): 2}), defaultdict(int)]),
    ("deque", lambda: [deque(), deque([1, (2,)]), deque([1, 2, 3], maxlen=3), deque(maxlen=0)]),
    ("namedtuples", lambda: [Pair(1, [2]), Triple(1, (2,)), NamedPair(Pair(1, 2), Triple(1, 2, 3))]),
    ("dataclasses", lambda: [Config("a", [1, (2,)], {"b": 1}), Frozen(1, [2]), Box(3), Config("nested", [Frozen(1)])]),
    ("slotted dataclasses", lambda: [Slotted([1]), FrozenSlotted((1,)), _deleted_slot()]),
    ("dataclass with more and less attributes", _child),
    ("many dataclasses", lambda: [Config(str(i), [i], Slotted(i)) for i in range(50)]),
    ("enums", lambda: [Color.RED, Color.GREEN, Color.CRIMSON, Level.HIGH, Word.YES]),
    ("flags", lambda: [Access.READ, Access.READ | Access.EXECUTE, Access(0), ~Access.WRITE, Mode.A | Mode.B, Mode(8)]),
    ("ranges", lambda: [range(0), range(3), range(10, -5, -3), range(2**70, 2**71)]),
    ("slices", lambda: [slice(None), slice(1, "a", (2,)), slice(2**80)]),
    ("singletons", lambda: [..., NotImplemented, (...,)]),
    ("builtin types", lambda: [int, str, dict, list, type(None), OrderedDict, dt.date]),
    ("torch names", lambda: [torch.float32, torch.bfloat16, torch.strided, torch.sparse_coo, torch.channels_last]),
    ("torch sizes", lambda: [torch.Size(), torch.Size([2, 0, 3])]),
    (
        "torch devices",
        lambda: [torch.device("cpu"), torch.device("cuda:1"), torch.device("cuda"), torch.device("meta")],
    ),
    ("structseq", lambda: torch.max(torch.tensor([[1.0, 2.0]]), dim=1)),
    ("dates", lambda: [dt.date(2024, 2, 29), dt.date.min, dt.date.max]),
    ("times", lambda: [dt.time(1, 2, 3, 4, fold=1), dt.time(5, tzinfo=dt.timezone.utc)]),
    (
        "datetimes",
        lambda: [
            dt.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, seconds=5), "odd")),
        ],
    ),
    ("timedeltas", lambda: [dt.timedelta(), dt.timedelta(-1, 2, 3), dt.timedelta.max]),
    ("timezones", lambda: [dt.timezone.utc, dt.timezone(dt.timedelta(hours=2))]),
    ("zones", lambda: [zoneinfo.ZoneInfo("UTC"), dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))]),
    ("decimals", lambda: [decimal.Decimal(text) for text in ("1.50", "-0", "1E+999", "NaN", "sNaN123", "-Infinity")]),
    (
        "uuids",
        lambda: [
            uuid.UUID(int=5),
            uuid.UUID("a8098c1a-f86e-11da-bd1a-00112444be1e"),
            uuid.UUID("16fd2706-8baf-433b-82eb-8c7fada847da"),
        ],
    ),
    (
        "paths",
        lambda: [pathlib.Path("/a/b"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path()],
    ),
    ("deep list", lambda: _nested(400, lambda inner: [inner])),
    ("deep tuple", lambda: _nested(300, lambda inner: (inner,))),
    ("deep mixture", lambda: _nested(150, lambda inner: {"k": (inner, Frozen([1]))})),
    ("repeated container", _repeated),
    ("wide", lambda: {f"key{i}": {"a": i, "b": [float(i), str(i), None]} for i in range(500)}),
]

NUMPY: list[tuple[str, Callable[[], object]]] = [
    ("numpy numbers", lambda: [np.dtype(code).type(1) for code in "?bBhHiIlLqQefdgFDG"]),
    ("numpy nan", lambda: [np.float32("nan"), np.float16("-inf"), np.float64(-0.0)]),
    (
        "numpy times",
        lambda: [np.datetime64("2020-01-01"), np.datetime64("NaT"), np.timedelta64(5, "ms"), np.timedelta64(1)],
    ),
    ("numpy strings", lambda: [np.str_("naïve"), np.str_(""), np.bytes_(b"x\0y"), np.str_("trailing\0")]),
    ("numpy record", lambda: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0]),
    (
        "numpy dtypes",
        lambda: [np.dtype(spec) for spec in ("f4", ">i8", "U5", "S3", "M8[ns]", "O", "?", "V7", "q", "g")],
    ),
    (
        "numpy record dtypes",
        lambda: [np.dtype([("a", "i4"), ("b", "f8", (2,))]), np.dtype([("a", "i1"), ("b", "i4")], align=True)],
    ),
    ("arrays", lambda: [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(5), np.array([], dtype=np.int8)]),
    (
        "array dtypes",
        lambda: [np.zeros(3, dtype) for dtype in ("?", "i1", "u8", "f2", "f8", "c16", "g", ">i4", "M8[s]")],
    ),
    ("arrays of strings", lambda: [np.array(["a", "bcd"]), np.array([b"x", b"yz"]), np.array([["ü"]])]),
    ("array layouts", lambda: [np.asfortranarray(np.ones((2, 3))), np.arange(10)[::-2], np.ones((2, 3, 4))[:, 1]]),
    ("array of records", lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])),
    ("array of objects", lambda: np.array([1, "a", None, (2,)], dtype=object)),
    ("read-only array", lambda: [np.frombuffer(b"12345678", dtype=np.int32), np.arange(3)]),
    ("array twice", lambda: _of(np.arange(5), lambda a: [a, {"again": a}, Config("c", [a])])),
    ("large array", lambda: np.arange(200_000, dtype=np.float64)),
    ("masked array", lambda: np.ma.array([1, 2, 3], mask=[False, True, False])),
    ("array views", lambda: _of(np.arange(10), lambda a: [a, a[2:5], a.reshape(2, 5)])),
]

PICKLED: list[tuple[str, Callable[[], object]]] = [
    ("objects", lambda: [Plain(a=1, b=[Plain(c=(1, 2))]), WithSlots(3)]),
    ("object twice", _shared_object),
    ("subclasses of builtins", lambda: [MyList([1]), MyDict(a=1), MyStr("s"), MyInt(5), {MyStr("k"): MyInt(1)}]),
    ("counter", lambda: collections.Counter("hello")),
    ("fraction", lambda: fractions.Fraction(1, 3)),
    ("namespace", lambda: types.SimpleNamespace(a=1, b=[2])),
    ("own reduce", lambda: Reduced([1, 2])),
    ("exceptions", lambda: Plain(error=Problem("text", 5))),
    ("function", lambda: [function, math.sin]),
    ("class", lambda: [Config, Color, Plain]),
    ("lambda", lambda: _closure()),
    ("partial", lambda: functools.partial(function, 3)),
    ("bound method", lambda: Plain(x=1).method),
    ("local class", _local_class),
    ("object as a key", lambda: {Plain(a=1): 1}),
    ("cyclic list", _cyclic_list),
    ("cyclic dataclass", _cyclic_object),
    ("tensor in an object", lambda: _of(torch.arange(4.0), lambda t: [t, Plain(t=t, views=[t[1:], t.view(2, 2)])])),
    ("array in an object", lambda: _of(np.arange(4), lambda a: [Plain(a=a, more=(a, np.ones(3))), a])),
    ("module", lambda: torch.nn.Linear(2, 3)),
    ("defaultdict of a function", lambda: defaultdict(_closure, a=_closure())),
]


def quietly(make: Callable[[], T]) -> T:
    """Without torch's warnings about types that it may yet change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def all_dtypes() -> list[torch.dtype]:
    """Every dtype of this torch, each once."""
    found = {value: None for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def of_dtype(dtype: torch.dtype, elements: int = 6) -> torch.Tensor:
    """A tensor of any dtype but the quantized ones, with various bits."""
    size = quietly(lambda: torch.empty(0, dtype=dtype).element_size())
    raw = torch.arange(1, elements * size + 1, dtype=torch.uint8) * (1 if dtype is not torch.bool else 0)
    return quietly(lambda: raw.view(dtype))


def _overlapping() -> list[torch.Tensor]:
    base = torch.arange(12.0)
    return [base[0:6], base[3:9], base.view(3, 4), base[::2]]


def _coo(coalesced: bool) -> torch.Tensor:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    t = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, 5.0]), (2, 3), check_invariants=True)
    return t.coalesce() if coalesced else t


def _compressed(layout: torch.layout) -> torch.Tensor:
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0]])
    block = (1, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return quietly(lambda: dense.to_sparse(layout=layout, blocksize=block))


def _nested_tensor(layout: torch.layout) -> torch.Tensor:
    parts = [torch.arange(2.0), torch.arange(3.0)]
    return quietly(lambda: torch.nested.nested_tensor(parts, layout=layout))


def _per_tensor() -> torch.Tensor:
    return quietly(lambda: torch.quantize_per_tensor(torch.tensor([0.0, 0.5, 1.0]), 0.1, 3, torch.quint8))


def _per_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([1, 2])
    return quietly(lambda: torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8))


def _with_attribute() -> torch.Tensor:
    t = torch.ones(2)
    t.tag = "left"  # type: ignore[attr-defined]
    return t


TENSORS: list[tuple[str, Callable[[], object]]] = [
    *((str(dtype), functools.partial(of_dtype, dtype)) for dtype in all_dtypes() if dtype not in QUANTIZED),
    ("quantized per tensor", _per_tensor),
    ("quantized per channel", _per_channel),
    ("0-dim tensors", lambda: [torch.tensor(3.5), torch.tensor(True), torch.tensor(2, dtype=torch.uint8)]),
    ("empty tensors", lambda: [torch.empty(0), torch.empty(2, 0, 3), torch.empty(0, dtype=torch.bool)]),
    ("nan tensor", lambda: torch.tensor([float("nan"), -0.0, float("inf")])),
    ("tensor in a structure", lambda: {"a": [torch.ones(2, 3), None, {"pe": torch.arange(3), "n": 3}], "b": ("x",)}),
    ("stage output", lambda: (torch.randn(2, 4), None, {"pe": torch.randn(4), "n": 3})),
    ("transposed", lambda: torch.arange(6.0).view(2, 3).t()),
    ("permuted", lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1)),
    ("channels last", lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    ("expanded", lambda: torch.arange(3.0).view(3, 1).expand(3, 4)),
    ("strided view", lambda: torch.arange(20.0)[1::3]),
    ("small view of a large storage", lambda: torch.arange(100_000.0)[5:9]),
    ("qr", lambda: list(torch.linalg.qr(torch.randn(3, 3)))),
    ("conjugate", lambda: torch.tensor([1 + 2j, 3 - 4j]).conj()),
    ("negative", lambda: torch._neg_view(torch.arange(3.0))),
    ("imaginary part", lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag),
    ("same tensor twice", lambda: _of(torch.ones(3), lambda t: [t, t, {"again": t}])),
    ("overlapping views", _overlapping),
    ("diagonal view", lambda: _of(torch.arange(9.0).view(3, 3), lambda t: [t, t.diagonal(), t[:, 1]])),
    ("parameter", lambda: [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]),
    ("requires grad", lambda: [torch.ones(2, requires_grad=True), torch.arange(3), torch.ones(1)]),
    ("result of a computation", lambda: torch.ones(2, requires_grad=True) * 2),
    ("large tensor", lambda: torch.arange(300_000.0)),
    ("many tensors", lambda: [torch.full((16,), float(i)) for i in range(200)]),
    ("state dict", lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()),
    ("large and small", lambda: {"big": torch.arange(400_000), "small": torch.ones(3), "t": torch.ones(400, 400).t()}),
    ("sparse", lambda: [_coo(False), _coo(True)]),
    *((str(layout), functools.partial(_compressed, layout)) for layout in (torch.sparse_csr, torch.sparse_csc)),
    *((str(layout), functools.partial(_compressed, layout)) for layout in (torch.sparse_bsr, torch.sparse_bsc)),
    ("jagged", functools.partial(_nested_tensor, torch.jagged)),
    ("nested", functools.partial(_nested_tensor, torch.strided)),
    ("meta", lambda: [torch.empty(3, 2, device="meta"), torch.empty(2, 3, device="meta").t()]),
    ("tensor subclass", lambda: torch.ones(3).as_subclass(Labelled)),
    ("tensor with an attribute", _with_attribute),
    ("tensor as a key", lambda: _of(torch.ones(2), lambda t: [{t: 1}, t])),
    ("tensor and its array", lambda: _of(torch.arange(4.0), lambda t: [t, t.numpy()])),
]

VALUES: list[tuple[str, Callable[[], object]]] = [*PLAIN, *NUMPY, *TENSORS, *PICKLED]
# What restricted trust carries as well.
SAFE: list[tuple[str, Callable[[], object]]] = [
    (name, make)
    for name, make in [*PLAIN, *NUMPY, *TENSORS]
    if name not in ("array of objects", "masked array", "tensor subclass", "repeated container")
]
