"""What a message among several ranks carries: any number of encoded objects, each with the rank that it comes from.

A bundle is a message like any other, whose skeleton starts with a format of its own. Whoever passes it on need not
understand what is in it. docs/protocol.md is the specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from ..errors import ProtocolError
from ..packed import read_whole
from .frame import ALIGNMENT
from .notice import Notice, pack_notice, unpack_notice

FORMAT = 2
_START = struct.Struct("<BI")


class Parcel(NamedTuple):
    """One rank's part of a bundle.

    Attributes:
        origin: global rank that it comes from.
        notice: why there is no object, if so.
        apart: there is an object, and it comes in a message of its own.
        flags: of the head that the object would have as a message.
        skeleton: of the object.
        inline_bytes: size of its inline area.
        inline_at: where that starts in the inline area of the bundle it was read from.
    """

    origin: int
    notice: Notice | None = None
    apart: bool = False
    flags: int = 0
    skeleton: bytes | memoryview = b""
    inline_bytes: int = 0
    inline_at: int = 0


def pack_bundle(parcels: Sequence[Parcel]) -> tuple[bytes, list[int], int]:
    """The skeleton of a bundle, where in its inline area each parcel's own one starts, and the size of it all."""
    index: list[list[Any]] = []
    places: list[int] = []
    end = 0
    for parcel in parcels:
        if parcel.notice is not None:
            index.append([parcel.origin, pack_notice(parcel.notice)])
        elif parcel.apart:
            index.append([parcel.origin])
        else:
            index.append([parcel.origin, parcel.flags, len(parcel.skeleton), parcel.inline_bytes])
        place = end if not parcel.inline_bytes else (end + ALIGNMENT - 1) & -ALIGNMENT
        places.append(place)
        end = place + parcel.inline_bytes
    packed = msgpack.packb(index)
    skeletons = [parcel.skeleton for parcel in parcels]
    return b"".join((_START.pack(FORMAT, len(packed)), packed, *skeletons)), places, end


def read_bundle(skeleton: memoryview, inline_bytes: int) -> list[Parcel]:
    """Read :func:`pack_bundle`'s bytes; skeletons are views of them.

    Raises:
        ProtocolError: they are none, or say something else about the inline area than the head.
    """
    try:
        form, length = _START.unpack_from(skeleton)
        if form != FORMAT:
            raise ProtocolError("an object arrived where a bundle of objects was due")
        at = _START.size + length
        index = read_whole(skeleton[_START.size : at])
        parcels = list(_read_parcels(index, skeleton, at))
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"a damaged bundle arrived: {error}") from error
    if parcels and parcels[-1].inline_at + parcels[-1].inline_bytes != inline_bytes:
        raise ProtocolError("a damaged bundle arrived: its parcels do not fill its inline area")
    return parcels


def _read_parcels(index: list[list[Any]], skeleton: memoryview, at: int) -> Iterable[Parcel]:
    inline_at = 0
    for origin, *rest in index:
        if type(origin) is not int:
            raise ProtocolError("a damaged bundle arrived: a rank is no number")
        if not rest:
            yield Parcel(origin, apart=True, inline_at=inline_at)
        elif len(rest) == 1:
            yield Parcel(origin, unpack_notice(memoryview(rest[0])), inline_at=inline_at)
        else:
            flags, skeleton_bytes, inline_bytes = rest
            if {type(flags), type(skeleton_bytes), type(inline_bytes)} != {int}:
                raise ProtocolError("a damaged bundle arrived: a size in it is no number")
            if min(flags, skeleton_bytes, inline_bytes) < 0 or at + skeleton_bytes > len(skeleton):
                raise ProtocolError("a damaged bundle arrived: a size in it is wrong")
            if inline_bytes:
                inline_at = (inline_at + ALIGNMENT - 1) & -ALIGNMENT
            yield Parcel(origin, None, False, flags, skeleton[at : at + skeleton_bytes], inline_bytes, inline_at)
            at += skeleton_bytes
            inline_at += inline_bytes
