"""The extension codes of a skeleton: how it writes what msgpack has no type for. docs/protocol.md lists them.

A *leaf* is one extension object that stands for one value. A *mark* is the first element of an array and says what
that array becomes: nesting costs no nested packing that way. The numbers are part of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from msgpack import ExtType

# What the skeleton holds in place of a value: a leaf, or a list whose first element is a mark.
Part: TypeAlias = Any

# Leaves whose data is an index, little-endian and as short as possible.
MEMORY: Final = 0  # a tensor, array or buffer of the memory table
COMPOSITE: Final = 1  # an object of the composites
OPAQUE: Final = 2  # an object of the pickle stream
SHARED: Final = 3  # an earlier shared definition
MEMBER: Final = 4  # a member of an Enum: an entry of the class table
BIG_BYTES: Final = 5  # bytes kept in the memory table
BIG_BYTEARRAY: Final = 6
BIG_TEXT: Final = 7  # str, as UTF-8 in the memory table
RUN: Final = 8  # a list of consecutive entries of the memory table; data: the first and the last, 32 bits each

# Leaves whose data is the value.
INTEGER: Final = 16
COMPLEX: Final = 17
SINGLETON: Final = 18
BYTEARRAY: Final = 19
BUILTIN: Final = 20
TORCH_NAME: Final = 21
DEVICE: Final = 22
NUMPY_SCALAR: Final = 23
NUMPY_DTYPE: Final = 24
DECIMAL: Final = 25
UUID: Final = 26
PATH: Final = 27
DATE: Final = 28
TIMEDELTA: Final = 29
ZONE: Final = 30

# Marks.
TUPLE: Final = 64
SET: Final = 65
FROZENSET: Final = 66
DICT: Final = 67
ORDERED_DICT: Final = 68
DEFAULT_DICT: Final = 69
DEQUE: Final = 70
RANGE: Final = 71
SLICE: Final = 72
SIZE: Final = 73
DATETIME: Final = 74
TIME: Final = 75
TIMEZONE: Final = 76
NUMPY_RECORD: Final = 77
NUMPY_RECORD_DTYPE: Final = 78
INSTANCE: Final = 79  # data: index in the class table
DEFINITION: Final = 80  # of a shared part or of a composite: what follows may refer to it
NAMED: Final = 81  # a dict: the list of its keys, and the list of its values


def ext(code: int, data: bytes = b"") -> Part:
    """An ``ExtType`` without the checks of its constructor, which cost more than all the rest of a leaf."""
    return tuple.__new__(ExtType, (code, data))


def number(value: int) -> bytes:
    """A non-negative integer as the data of a leaf."""
    return value.to_bytes((value.bit_length() + 7) // 8, "little")


def indexed(code: int, index: int) -> Part:
    """A leaf or a mark whose data is an index."""
    return tuple.__new__(ExtType, (code, index.to_bytes((index.bit_length() + 7) // 8, "little")))


_memory_leaves = [indexed(MEMORY, index) for index in range(1024)]


def memory_leaves(count: int) -> list[Part]:
    """The leaves of at least so many tensors, by index. Nobody changes the list."""
    if count <= len(_memory_leaves):
        return _memory_leaves
    return [indexed(MEMORY, index) for index in range(count)]


class Mark:
    """What the first element of an array decodes to: it turns that array (itself included) into the value."""

    __slots__ = ("rebuild",)

    def __init__(self, rebuild: Callable[[list[Any]], Any]) -> None:
        self.rebuild = rebuild
