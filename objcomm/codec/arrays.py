"""numpy arrays: which ones travel as memory, how their dtypes are described, and how they are made again.

Nothing here imports numpy before an array is sent or arrives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DecodeError, EncodeError
from .form import READ_ONLY, Form

if TYPE_CHECKING:
    import numpy as np

# By character code, which tells types apart that share a size (long and longlong); by size where one is needed. numpy's
# own parser takes far more than a sender shall be able to ask for: a unit divided by 0 ends the process.
_SIMPLE = re.compile(
    r"[<>|][?bBhHiIlLqQefdgFDG]|[<>|][SUV][1-9]\d{0,9}|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,7}(/[1-9]\d{0,8})?\])?",
    re.ASCII,
)
_ORDER = "<" if sys.byteorder == "little" else ">"
_MAX_NESTING = 16
_ALIGNED, _RECORD = 1, 2

_simple: dict[tuple[str, str], str | None] = {}


def is_plain(obj: Any) -> bool:
    """Whether this is an array of numpy's own type whose elements are bytes: ``add_array`` takes it."""
    np = sys.modules.get("numpy")
    return np is not None and type(obj) is np.ndarray and _describe(obj.dtype) is not None


def form_of(obj: np.ndarray[Any, Any]) -> Form:
    """The form of an array that is plain.

    Raises:
        EncodeError: it is too large to be described.
    """
    flags = 0 if obj.flags.writeable else READ_ONLY
    try:
        return Form(_describe(obj.dtype), obj.dtype, obj.dtype.itemsize, obj.shape, obj.strides, flags)
    except ValueError as error:
        raise EncodeError(f"an array cannot be sent: {error}") from None


def address_of(obj: np.ndarray[Any, Any]) -> int:
    """Where the element with index 0 is."""
    address: int = obj.__array_interface__["data"][0]
    return address


# -- dtypes ------------------------------------------------------------------------------------------------------------


def _describe(dtype: Any) -> Any:
    """What :func:`dtype_from` makes the same dtype of; None if there is no such thing."""
    if dtype.names is None and dtype.subdtype is None and not dtype.metadata:
        key = (dtype.char, dtype.str)
        if key not in _simple:
            _simple[key] = _describe_simple(dtype)
        return _simple[key]
    try:
        spec = _describe_nested(dtype, 0)
        return spec if spec is not None and _same(dtype_from(spec), dtype) else None
    except (DecodeError, ValueError, TypeError):
        return None


def _describe_simple(dtype: Any) -> str | None:
    order = dtype.byteorder.replace("=", _ORDER)
    for spec in (order + dtype.char, dtype.str):
        if _SIMPLE.fullmatch(spec) and _same(dtype_from(spec), dtype):
            return str(spec)
    return None


def _describe_nested(dtype: Any, depth: int) -> Any:
    if depth > _MAX_NESTING or dtype.metadata:
        return None
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = _describe_nested(base, depth + 1)
        return None if inner is None else [inner, list(shape)]
    if dtype.names is None:
        return _describe(dtype)
    fields: list[Any] = []
    for name in dtype.names:
        inner, offset, *title = dtype.fields[name]
        spec = _describe_nested(inner, depth + 1)
        if spec is None or (title and type(title[0]) is not str):
            return None
        fields.append([name, title[0] if title else None, offset, spec])
    flags = (_ALIGNED if dtype.isalignedstruct else 0) | (_RECORD if dtype.type.__name__ == "record" else 0)
    return [dtype.itemsize, flags, fields]


def _same(one: Any, other: Any) -> bool:
    return bool(
        one == other
        and one.type is other.type
        and one.char == other.char
        and one.isalignedstruct == other.isalignedstruct
        and one.fields == other.fields
    )


def dtype_from(spec: Any, depth: int = 0) -> np.dtype[Any]:
    """The dtype of a description.

    Raises:
        DecodeError: it is malformed, or numpy is missing here.
    """
    try:
        import numpy as np
    except ImportError:
        raise DecodeError("the message holds numpy arrays, and numpy is not installed here") from None
    try:
        if type(spec) is str:
            if not _SIMPLE.fullmatch(spec):
                raise ValueError(f"{spec!r} is no plain dtype")
            return np.dtype(spec)
        if depth > _MAX_NESTING or type(spec) is not list:
            raise ValueError("it is nested too deeply")
        if len(spec) == 2:
            inner, shape = spec
            if not shape or not all(type(extent) is int and 0 <= extent < 1 << 31 for extent in shape):
                raise ValueError(f"the shape {shape}")
            return np.dtype((dtype_from(inner, depth + 1), tuple(shape)))
        itemsize, flags, fields = spec
        layout: Any = {
            "names": [name for name, _, _, _ in fields],
            "formats": [dtype_from(inner, depth + 1) for _, _, _, inner in fields],
            "offsets": [offset for _, _, offset, _ in fields],
            "itemsize": itemsize,
        }
        _check_fields(itemsize, flags, fields)
        if any(title is not None for _, title, _, _ in fields):
            layout["titles"] = [title for _, title, _, _ in fields]
        dtype: Any = np.dtype(layout, align=bool(flags & _ALIGNED))
        return np.dtype((np.record, dtype)) if flags & _RECORD else dtype
    except (ValueError, TypeError, OverflowError) as error:
        raise DecodeError(f"the message describes a dtype of numpy wrongly: {error}") from None


def _check_fields(itemsize: Any, flags: Any, fields: list[Any]) -> None:
    if type(itemsize) is not int or not 0 <= itemsize < 1 << 31 or flags not in range(4):
        raise ValueError(f"an item of {itemsize} bytes with the flags {flags}")
    for name, title, offset, _ in fields:
        if type(name) is not str or type(title) not in (str, type(None)):
            raise ValueError(f"a field named {name!r}, {title!r}")
        if type(offset) is not int or not 0 <= offset <= itemsize:
            raise ValueError(f"a field at {offset}")


# -- decoding ----------------------------------------------------------------------------------------------------------


def read_form(spec: Any, flags: int, shape: Sequence[int], strides: Sequence[int] | None) -> Form:
    """The form of an array as it came in a message.

    Raises:
        DecodeError: no array here can have it.
    """
    if flags & ~READ_ONLY:
        raise DecodeError(f"an array with the flags {flags}")
    dtype = dtype_from(spec)
    return Form(spec, dtype, dtype.itemsize, shape, strides, flags)


def over(form: Form, memory: torch.Tensor, offset: int) -> np.ndarray[Any, Any]:
    """An array over bytes of the CPU; ``offset`` is where its lowest byte is."""
    import numpy as np

    array: np.ndarray[Any, Any] = np.ndarray(
        tuple(form.shape), form.dtype, memory.numpy(), offset + form.lead, tuple(form.strides)
    )
    return array


def fresh(form: Form, memory: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array with memory of its own, filled with the bytes of its hull."""
    import numpy as np

    array: np.ndarray[Any, Any]
    if form.natural:
        array = np.ndarray(tuple(form.shape), form.dtype)
        if form.hull:
            array.reshape(-1).view(np.uint8)[:] = memory.numpy()
        return array
    own = np.ndarray(max(form.hull, 1), np.uint8)
    own[: form.hull] = memory.numpy()
    array = np.ndarray(tuple(form.shape), form.dtype, own, form.lead, tuple(form.strides))
    return array


def finished(form: Form, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with what its flags say."""
    if form.flags & READ_ONLY:
        array.flags.writeable = False
    return array
