"""The head of a message as bytes: a fixed header, the segment table, the channel, the skeleton, the inline area.

docs/protocol.md is the specification. All numbers are little-endian. The receiver reads the first ``window`` bytes,
validates the header before it allocates anything, and only then knows how many bytes are still to come.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from ..errors import LimitError, ProtocolError, UsageError

MAGIC = b"OBJC"
VERSION = 1
ALIGNMENT = 64
# The first message of every head holds the header, whatever the backend: a window is never smaller than this.
MIN_WINDOW = 4096
MAX_CHANNEL_BYTES = 1024
CHUNK_BYTES = 4 << 20

_FIXED = struct.Struct("<4sBBHQQQQIHHIIQ")
_CHECKSUM = struct.Struct("<II")  # of the fixed part, and a reserved word
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = 8
_HEADER = struct.Struct(_FIXED.format + "II")
HEADER_BYTES = _HEADER.size
_ACCELERATOR = 1 << 63
_NO_SEGMENTS: tuple[tuple[int, bool], ...] = ()


class Kind(IntEnum):
    """What a head announces."""

    DATA = 1
    ERROR = 2
    GOODBYE = 3


# Looked up on every message: a dict and an int cost a fraction of the enum's own calls.
_KINDS = {int(kind): kind for kind in Kind}
_DATA = int(Kind.DATA)


class Flag(IntEnum):
    """Bits of the header's flags."""

    OPAQUE = 1  # the skeleton refers to at least one pickled leaf
    CHUNKED = 2  # segments from CPU memory travel in chunks, since they are passed on from rank to rank


@dataclass(frozen=True)
class Terms:
    """What both ends of a pair must agree on before they exchange anything.

    Attributes:
        window: bytes of the first message of a head.
        max_bytes: the largest message, head and segments together.
        version: of the protocol.
    """

    window: int
    max_bytes: int
    version: int = VERSION


class Header(NamedTuple):
    """The fixed part of a head, validated against itself and against this rank's terms.

    Attributes:
        body_bytes: segment table, channel and skeleton.
        inline_at: where the inline area starts in the frame.
        frame_bytes: the whole frame.
        segment_bytes: of all segments together.
    """

    kind: Kind
    flags: int
    sequence: int
    inline_bytes: int
    segment_bytes: int
    segment_count: int
    channel_bytes: int
    body_checksum: int
    body_bytes: int
    inline_at: int
    frame_bytes: int


class Body(NamedTuple):
    """What stands between the header and the inline area.

    Attributes:
        segments: of each segment its bytes and whether it was in accelerator memory on the sender.
    """

    channel: str
    segments: tuple[tuple[int, bool], ...]
    skeleton: memoryview


def frame_layout(body_bytes: int, inline_bytes: int) -> tuple[int, int]:
    """Where the inline area starts and how long the frame is, both in bytes."""
    body_end = HEADER_BYTES + body_bytes
    if not inline_bytes:
        return body_end, body_end
    inline_at = (body_end + ALIGNMENT - 1) & -ALIGNMENT
    return inline_at, inline_at + inline_bytes


def channel_name(channel: str) -> bytes:
    """The channel as it stands in the head.

    Raises:
        UsageError: it is no string, or longer than 1,024 bytes of UTF-8.
    """
    if not isinstance(channel, str):
        raise UsageError(f"channel must be a string, not {channel!r}")
    if not channel:
        return b""
    name = channel.encode("utf-8", "surrogatepass")
    if len(name) > MAX_CHANNEL_BYTES:
        raise UsageError(f"a channel's name may have {MAX_CHANNEL_BYTES} bytes, this one has {len(name)}")
    return name


class Content:
    """What one message holds, the same for every receiver.

    Attributes:
        segments: of each its bytes and whether it is in accelerator memory.
        inline_at: where the inline area starts in the frame.
        frame_bytes: the whole frame.
        nbytes: frame and segments together.
    """

    __slots__ = ("_body", "_kind", "_sizes", "frame_bytes", "inline_at", "nbytes", "segments")

    def __init__(
        self,
        kind: Kind,
        flags: int,
        channel: bytes,
        skeleton: bytes,
        inline_bytes: int = 0,
        segments: Sequence[tuple[int, bool]] = (),
    ) -> None:
        segment_bytes = 0
        if segments:
            segment_bytes = sum([size for size, _ in segments])
            table = struct.pack(f"<{len(segments)}Q", *[size | _ACCELERATOR if acc else size for size, acc in segments])
            self._body = b"".join((table, channel, skeleton))
        else:
            self._body = channel + skeleton if channel else skeleton
        self.segments = segments
        self._kind = (int(kind), flags)
        self._sizes = (
            len(skeleton),
            inline_bytes,
            segment_bytes,
            len(segments),
            len(channel),
            0,
        )
        self.inline_at, self.frame_bytes = frame_layout(len(self._body), inline_bytes)
        self.nbytes = self.frame_bytes + segment_bytes

    def head(self, sequence: int, terms: Terms) -> bytes:
        """All of the frame that stands in front of the inline area's padding."""
        body = self._body
        fixed = _FIXED.pack(
            MAGIC,
            terms.version,
            *self._kind,
            sequence,
            *self._sizes,
            terms.window,
            crc32(body),
            terms.max_bytes,
        )
        return b"".join((fixed, _CHECKSUM.pack(crc32(fixed), 0), body))


def renumber(frame: memoryview, sequence: int) -> None:
    """Give a frame another sequence number, and the header the checksum that belongs to it."""
    _SEQUENCE.pack_into(frame, _SEQUENCE_AT, sequence)
    _CHECKSUM.pack_into(frame, _FIXED.size, crc32(frame[: _FIXED.size]), 0)


def read_header(window: memoryview, terms: Terms) -> Header:
    """Read and validate the fixed header at the start of ``window``; nothing is allocated by what it says.

    Raises:
        ProtocolError: not a frame of ours, damaged, or made under other terms than ``terms``.
        LimitError: a whole frame of a message larger than ``terms.max_bytes``.
    """
    (
        magic,
        version,
        kind,
        flags,
        sequence,
        skeleton_bytes,
        inline_bytes,
        segment_bytes,
        segment_count,
        channel_bytes,
        _,
        window_bytes,
        body_checksum,
        max_bytes,
        header_checksum,
        _,
    ) = _HEADER.unpack_from(window)
    if magic != MAGIC:
        raise ProtocolError(
            f"what arrived is no objcomm message: it starts with {magic!r}, not {MAGIC!r}",
            hint="something else sends on this group and tag, or the peer does not use objcomm",
        )
    # The magic and the version keep their place in every version; all after them may be laid out in another way.
    if version != terms.version:
        raise ProtocolError(f"the peer speaks version {version} of the protocol, this rank version {terms.version}")
    if crc32(window[: _FIXED.size]) != header_checksum:
        raise ProtocolError("the head is damaged: the header does not match its checksum")
    if kind not in _KINDS:
        raise ProtocolError(f"a head of unknown kind {kind}")
    # A failed send must be heard whatever else the two ends differ in.
    if kind == _DATA and (window_bytes != terms.window or max_bytes != terms.max_bytes):
        agree(terms, Terms(window_bytes, max_bytes, version))
    body_bytes = 8 * segment_count + channel_bytes + skeleton_bytes
    inline_at, frame_bytes = frame_layout(body_bytes, inline_bytes)
    if channel_bytes > MAX_CHANNEL_BYTES or (kind != _DATA and (frame_bytes > terms.window or segment_bytes)):
        raise ProtocolError("the head's sizes contradict each other: a channel or a notice longer than allowed")
    if frame_bytes + segment_bytes > terms.max_bytes and kind == _DATA:
        raise LimitError(
            f"a message of {frame_bytes + segment_bytes} bytes arrived, max_bytes is {terms.max_bytes}",
            hint="raise max_bytes on all ranks",
        )
    return Header(
        _KINDS[kind],
        flags,
        sequence,
        inline_bytes,
        segment_bytes,
        segment_count,
        channel_bytes,
        body_checksum,
        body_bytes,
        inline_at,
        frame_bytes,
    )


def read_body(frame: memoryview, header: Header) -> Body:
    """Read what follows the header, from at least the part of the frame in front of its inline area.

    Raises:
        ProtocolError: damaged, or the segment table contradicts the header.
    """
    body = frame[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    if len(body) != header.body_bytes or crc32(body) != header.body_checksum:
        raise ProtocolError("the head is damaged: what follows the header does not match its checksum")
    at, segments = 0, _NO_SEGMENTS
    if header.segment_count:
        at = 8 * header.segment_count
        table = struct.unpack_from(f"<{header.segment_count}Q", body)
        segments = tuple((size & (_ACCELERATOR - 1), size >= _ACCELERATOR) for size in table)
    total = sum([size for size, _ in segments]) if segments else 0
    if header.segment_bytes != total or (segments and not min(segments)[0]):
        raise ProtocolError("the head's sizes contradict each other: the segment table and the header")
    end = at + header.channel_bytes
    channel = ""
    if end > at:
        try:
            channel = str(body[at:end], "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ProtocolError("the head is damaged: the channel's name is no UTF-8") from error
    return Body(channel, segments, body[end:] if end else body)


def agree(mine: Terms, theirs: Terms) -> None:
    """Compare the terms of two ranks.

    Raises:
        ProtocolError: they differ, naming both values of what differs.
    """
    if mine == theirs:
        return
    differences = [
        f"{name} is {getattr(mine, name)} here and {getattr(theirs, name)} on the peer"
        for name in ("version", "window", "max_bytes")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    raise ProtocolError(
        f"the two ranks do not agree: {', '.join(differences)}",
        hint="give all ranks the same objcomm version and the same OBJCOMM_MAX_BYTES or configure(max_bytes=)",
    )
