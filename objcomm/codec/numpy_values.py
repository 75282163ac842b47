"""numpy's scalars and dtypes. Nothing here imports numpy before a message holds one of them."""

from __future__ import annotations

import re
import sys
from typing import Any

from . import codes
from .allowance import spend
from .codes import Part, ext

# Character codes tell types apart that share a size (int64 and longlong), and need no import to be checked. numpy's
# own parser of dtype strings takes more than a sender shall be able to ask for.
_NUMBER = re.compile(r"[<>][?bBhHiIlLqQefdgFDG]|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,7}\])?", re.ASCII)
_SIMPLE = re.compile(
    r"[<>|=]?[?bBhHiIlLqQefdgFDGO]|[<>|=]?[biufcmMSUV]\d{1,10}(\[\d{0,9}[A-Za-z]{1,7}\])?|T|[<>|=]?[mM]8", re.ASCII
)
_ORDER = "<" if sys.byteorder == "little" else ">"


def scalar(obj: Any) -> Part | None:
    """The part of a ``numpy.generic`` of a type of numpy's own; ``None`` for records and objects."""
    import numpy as np

    cls, dtype = type(obj), obj.dtype
    if cls is np.str_:  # numpy's own conversions drop trailing zeros
        return ext(codes.NUMPY_SCALAR, b"U\0" + str.__str__(obj).encode("utf-8", "surrogatepass"))
    if cls is np.bytes_:
        return ext(codes.NUMPY_SCALAR, b"S\0" + bytes.__getitem__(obj, slice(None)))
    spec = dtype.str if dtype.char in "mM" else _ORDER + dtype.char
    if dtype.type is not cls or not _NUMBER.fullmatch(spec):
        return None
    return ext(codes.NUMPY_SCALAR, spec.encode() + b"\0" + obj.tobytes())


def scalar_from(data: bytes) -> object:
    import numpy as np

    name, _, content = data.partition(b"\0")
    spec = name.decode()
    if spec == "U":
        return np.str_(content.decode("utf-8", "surrogatepass"))
    if spec == "S":
        return np.bytes_(content)
    if not _NUMBER.fullmatch(spec):
        raise ValueError(f"{spec!r} is no numpy scalar")
    dtype = np.dtype(spec)
    if dtype.itemsize != len(content):
        raise ValueError(f"a numpy {dtype} has {dtype.itemsize} bytes here, not {len(content)}")
    return np.ndarray((), dtype, content)[()]


def dtype(obj: Any) -> Part | None:
    """The part of a simple ``numpy.dtype``; ``None`` for records and whatever else a string does not say in full."""
    import numpy as np

    if obj.names is None and obj.subdtype is None and obj.metadata is None:
        for spec in (obj.byteorder.replace("=", _ORDER) + obj.char, obj.str):
            if _SIMPLE.fullmatch(spec):
                again = np.dtype(spec)
                if again == obj and again.char == obj.char and again.isnative == obj.isnative:
                    return ext(codes.NUMPY_DTYPE, spec.encode())
    return None


def dtype_from(data: bytes) -> object:
    import numpy as np

    spec = data.decode()
    if not _SIMPLE.fullmatch(spec):
        raise ValueError(f"{spec!r} is no numpy dtype")
    return np.dtype(spec)


def record_as_array(obj: Any) -> Any:
    """A record scalar as the array without dimensions that holds it; None for scalars of no type of numpy's own."""
    import numpy as np

    return np.asarray(obj) if type(obj) is obj.dtype.type and obj.dtype.type is np.void else None


def record_from(items: list[Any]) -> object:
    array = _only_array(items)
    if array.shape != ():
        raise ValueError("a record is an array without dimensions")
    spend(array.nbytes)
    return array.copy()[()]


def empty(dtype_: Any) -> Any:
    """An array without elements, to carry a dtype."""
    import numpy as np

    return np.empty(0, dtype_)


def record_dtype_from(items: list[Any]) -> object:
    return _only_array(items).dtype


def _only_array(items: list[Any]) -> Any:
    import numpy as np

    _, array = items
    if type(array) is not np.ndarray:
        raise ValueError("something else where an array should be")
    return array
