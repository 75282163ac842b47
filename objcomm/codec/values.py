"""Values of Python, torch and the standard library that need neither memory of their own nor a class of the user.

``ENCODERS`` takes an object of exactly the given type to its part; ``None`` means that this one object has more to it
than its type says, so it has to be pickled. ``LEAVES`` and ``LISTS`` are the way back. Both ends run nothing but
constructors of builtin types here, so restricted trust allows all of it.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import os
import pathlib
import re
import struct
import types
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from ..errors import TrustError
from . import codes
from .codes import Part, ext

_ORDERED_DICT, _DEFAULT_DICT, _DEQUE = ext(codes.ORDERED_DICT), ext(codes.DEFAULT_DICT), ext(codes.DEQUE)
_DATETIME, _TIME, _TIMEZONE = ext(codes.DATETIME), ext(codes.TIME), ext(codes.TIMEZONE)

_COMPLEX = struct.Struct("<dd")
_DATE = struct.Struct("<HBB")
_TIMEDELTA = struct.Struct("<iii")

_SINGLETONS: dict[bytes, object] = {b"": ..., b"\x01": NotImplemented}

# Classes that may be named wherever trust is restricted: calling them builds a value and does nothing else.
_BUILTINS: dict[str, type] = {
    cls.__qualname__: cls
    for cls in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, object),
        *(OrderedDict, defaultdict, deque, types.NoneType, types.EllipsisType, decimal.Decimal, uuid.UUID),
        *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone, collections.Counter),
    )
}
_BUILTIN_NAMES = {cls: name.encode() for name, cls in _BUILTINS.items()}

_PATHS: dict[bytes, type[pathlib.PurePath]] = {
    cls.__name__.encode(): cls
    for cls in (*(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),)
}

_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,4}", re.ASCII)
_TORCH_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


# -- encoding ----------------------------------------------------------------------------------------------------------


def _sequence(code: int) -> Callable[[Any], Part]:
    mark = ext(code)
    return lambda obj: [mark, *obj]


def _bounds(code: int) -> Callable[[Any], Part]:
    mark = ext(code)
    return lambda obj: [mark, obj.start, obj.stop, obj.step]


def _default_dict(obj: defaultdict[Any, Any]) -> Part:
    return [_DEFAULT_DICT, obj.default_factory, *chain.from_iterable(obj.items())]


def _ordered_dict(obj: OrderedDict[Any, Any]) -> Part | None:
    return None if vars(obj) else [_ORDERED_DICT, *chain.from_iterable(obj.items())]


def _builtin(obj: type) -> Part | None:
    name = _BUILTIN_NAMES.get(obj) if type(obj) is type else None
    return None if name is None else ext(codes.BUILTIN, name)


def big_integer(obj: int) -> Part:
    """An integer that msgpack's 64 bits do not hold."""
    return ext(codes.INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))


def _datetime(obj: dt.datetime) -> Part:
    clock = (obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold)
    return [_DATETIME, obj.year, obj.month, obj.day, *clock, obj.tzinfo]


def _time(obj: dt.time) -> Part:
    return [_TIME, obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold, obj.tzinfo]


def _timezone(obj: dt.timezone) -> Part:
    return [_TIMEZONE, *obj.__getinitargs__()]  # type: ignore[attr-defined]


def _uuid(obj: uuid.UUID) -> Part:
    return ext(codes.UUID, obj.bytes + obj.is_safe.name.encode())


def _path(obj: pathlib.PurePath) -> Part:
    return ext(codes.PATH, type(obj).__name__.encode() + b"\0" + str(obj).encode("utf-8", "surrogatepass"))


ENCODERS: dict[type, Callable[[Any], Part | None]] = {
    tuple: _sequence(codes.TUPLE),
    set: _sequence(codes.SET),
    frozenset: _sequence(codes.FROZENSET),
    torch.Size: _sequence(codes.SIZE),
    OrderedDict: _ordered_dict,
    defaultdict: _default_dict,
    deque: lambda obj: [_DEQUE, obj.maxlen, *obj],
    range: _bounds(codes.RANGE),
    slice: _bounds(codes.SLICE),
    complex: lambda obj: ext(codes.COMPLEX, _COMPLEX.pack(obj.real, obj.imag)),
    types.EllipsisType: lambda obj: ext(codes.SINGLETON),
    types.NotImplementedType: lambda obj: ext(codes.SINGLETON, b"\x01"),
    type: _builtin,
    dt.datetime: _datetime,
    dt.date: lambda obj: ext(codes.DATE, _DATE.pack(obj.year, obj.month, obj.day)),
    dt.time: _time,
    dt.timedelta: lambda obj: ext(codes.TIMEDELTA, _TIMEDELTA.pack(obj.days, obj.seconds, obj.microseconds)),
    dt.timezone: _timezone,
    decimal.Decimal: lambda obj: ext(codes.DECIMAL, str(obj).encode()),
    uuid.UUID: _uuid,
    **dict.fromkeys(_PATHS.values(), _path),
    **{cls: lambda obj: ext(codes.TORCH_NAME, str(obj).encode()) for cls in _TORCH_NAMED},
    torch.device: lambda obj: ext(codes.DEVICE, str(obj).encode()),
}


def zone(obj: Any) -> Part | None:
    """A ``zoneinfo.ZoneInfo``, by its key."""
    return None if obj.key is None else ext(codes.ZONE, obj.key.encode())


# -- decoding ----------------------------------------------------------------------------------------------------------


def _torch_name(data: bytes) -> object:
    prefix, _, name = data.decode().partition(".")
    value = torch.__dict__.get(name) if prefix == "torch" else None
    if type(value) not in _TORCH_NAMED:
        raise ValueError(f"torch has no {data!r}")
    return value


def _device(data: bytes) -> torch.device:
    return torch.device(data.decode())


def _uuid_from(data: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=data[:16], is_safe=uuid.SafeUUID[data[16:].decode()])


def _path_from(data: bytes) -> pathlib.PurePath:
    name, _, text = data.partition(b"\0")
    return _PATHS[name](text.decode("utf-8", "surrogatepass"))


def _zone_from(data: bytes) -> object:
    import zoneinfo

    return zoneinfo.ZoneInfo(data.decode())


def zone_of_the_system(data: bytes) -> object:
    """The same in restricted trust: what is no file of the system ``ZoneInfo`` would import from a package tzdata."""
    import zoneinfo

    key = data.decode()
    if _ZONE.fullmatch(key) is None or not any(os.path.isfile(os.path.join(path, key)) for path in zoneinfo.TZPATH):
        raise TrustError(f"restricted trust takes time zones from files of the system, and {key!r} is none")
    return zoneinfo.ZoneInfo(key)


def _date_from(data: bytes) -> dt.date:
    return dt.date(*_DATE.unpack(data))


def _timedelta_from(data: bytes) -> dt.timedelta:
    return dt.timedelta(*_TIMEDELTA.unpack(data))


LEAVES: dict[int, Callable[[bytes], object]] = {
    codes.INTEGER: lambda data: int.from_bytes(data, "little", signed=True),
    codes.COMPLEX: lambda data: complex(*_COMPLEX.unpack(data)),
    codes.SINGLETON: _SINGLETONS.__getitem__,
    codes.BYTEARRAY: bytearray,
    codes.BUILTIN: lambda data: _BUILTINS[data.decode()],
    codes.TORCH_NAME: _torch_name,
    codes.DEVICE: _device,
    codes.DECIMAL: lambda data: decimal.Decimal(data.decode()),
    codes.UUID: _uuid_from,
    codes.PATH: _path_from,
    codes.DATE: _date_from,
    codes.TIMEDELTA: _timedelta_from,
    codes.ZONE: _zone_from,
}


def _pairs(items: list[Any], start: int) -> Iterator[tuple[Any, Any]]:
    if (len(items) - start) % 2:
        raise ValueError("a key without a value")
    return zip(items[start::2], items[start + 1 :: 2], strict=True)


def _default_dict_from(items: list[Any]) -> defaultdict[Any, Any]:
    return defaultdict(items[1], _pairs(items, 2))


def _ints(items: list[Any]) -> list[Any]:
    """Constructors would ask anything else for its ``__index__``, which may be code of a user's class."""
    if not all(type(item) is int for item in items):
        raise ValueError("something else where an integer should be")
    return items


def _deque(items: list[Any]) -> deque[Any]:
    if items[1] is not None and len(items) - 2 > _ints(items[1:2])[0]:
        raise ValueError("a deque longer than its maxlen")
    return deque(items[2:], items[1])


def _range(items: list[Any]) -> range:
    start, stop, step = _ints(items[1:])
    return range(start, stop, step)


def _slice(items: list[Any]) -> slice:
    _, start, stop, step = items
    return slice(start, stop, step)


def _datetime_from(items: list[Any]) -> dt.datetime:
    year, month, day, hour, minute, second, microsecond, fold = _ints(items[1:-1])
    return dt.datetime(year, month, day, hour, minute, second, microsecond, items[-1], fold=fold)


def _time_from(items: list[Any]) -> dt.time:
    hour, minute, second, microsecond, fold = _ints(items[1:-1])
    return dt.time(hour, minute, second, microsecond, tzinfo=items[-1], fold=fold)


# A list hook gets the mark as the first item.
LISTS: dict[int, Callable[[list[Any]], object]] = {
    codes.TUPLE: lambda items: tuple(items[1:]),
    codes.SET: lambda items: set(items[1:]),
    codes.FROZENSET: lambda items: frozenset(items[1:]),
    codes.DICT: lambda items: dict(_pairs(items, 1)),
    codes.ORDERED_DICT: lambda items: OrderedDict(_pairs(items, 1)),
    codes.DEFAULT_DICT: _default_dict_from,
    codes.DEQUE: _deque,
    codes.RANGE: _range,
    codes.SLICE: _slice,
    codes.SIZE: lambda items: torch.Size(_ints(items[1:])),
    codes.DATETIME: _datetime_from,
    codes.TIME: _time_from,
    codes.TIMEZONE: lambda items: dt.timezone(*items[1:]),
}
