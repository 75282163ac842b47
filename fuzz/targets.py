"""The inputs of the fuzzer: bytes -> what a receiver does with a message, a skeleton, or an entry of the store."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch

import tests.values  # noqa: F401  classes that a receiver may have
from attacks.common import parse_to_size
from objcomm.codec import parse
from objcomm.config import Trust
from objcomm.errors import DecodeError, LimitError, ObjcommError, TrustError
from objcomm.wire import card, roll
from objcomm.wire.bundle import read_bundle
from objcomm.wire.frame import HEADER_BYTES, Flag, Kind, Terms, read_body, read_header
from objcomm.wire.notice import error_of, unpack_notice

from .guard import MAX_BYTES, watched

TERMS = Terms(window=1 << 16, max_bytes=MAX_BYTES)


def build(skeleton: bytes | memoryview, inline_bytes: int, segments: list[tuple[int, bool]], trust: Trust) -> Any:
    """Parse and build; an inline area of another size than announced is tried once more with the right one."""
    plan, inline_bytes = parse_to_size(skeleton, inline_bytes, segments, trust, MAX_BYTES)
    inline = torch.arange(inline_bytes, dtype=torch.int64).to(torch.uint8)
    return plan.build(inline, [torch.ones(nbytes, dtype=torch.uint8) for nbytes, _ in segments])


def frame(data: bytes) -> None:
    """A whole message: the head as it came off the wire; its checksums are put right first, unless bit 0 says not."""
    if len(data) < HEADER_BYTES + 1:
        return
    choice, data = data[0], data[1:]
    if not choice & 1:
        data = mended(data)
    trust: Trust = "restricted"
    with watched():
        window = memoryview(data[: TERMS.window].ljust(TERMS.window, b"\0"))
        header = read_header(window, TERMS)
        body = read_body(memoryview(data), header)
        if header.kind is not Kind.DATA:
            error = error_of(unpack_notice(body.skeleton), 1)
            str(error.locate(rank=0, phase="head"))
            return
        inline = data[header.inline_at : header.frame_bytes]
        if choice & 2:
            for parcel in read_bundle(body.skeleton, header.inline_bytes):
                if parcel.notice is not None:
                    str(error_of(parcel.notice, 1))
                elif not parcel.apart:
                    bool(parcel.flags & Flag.OPAQUE)
                    try:
                        build(parcel.skeleton, parcel.inline_bytes, [], trust)
                    except (DecodeError, LimitError, TrustError) as refused:
                        str(refused)
            return
        if len(inline) == header.inline_bytes and sum(size for size, _ in body.segments) <= MAX_BYTES:
            build(body.skeleton, header.inline_bytes, list(body.segments), trust)


def mended(data: bytes) -> bytes:
    """A frame with the magic, the terms and the checksums that it should have."""
    fixed = bytearray(data[: HEADER_BYTES - 8])
    fixed[:5] = b"OBJC\1"
    struct.pack_into("<I", fixed, 48, TERMS.window)
    struct.pack_into("<Q", fixed, 56, TERMS.max_bytes)
    skeleton_bytes, _inline_bytes, _, count = struct.unpack_from("<QQQI", fixed, 16)
    (channel_bytes,) = struct.unpack_from("<H", fixed, 44)
    end = HEADER_BYTES + 8 * count + channel_bytes + skeleton_bytes
    struct.pack_into("<I", fixed, 52, crc32(data[HEADER_BYTES : min(end, len(data))]))
    return bytes(fixed) + struct.pack("<II", crc32(fixed), 0) + data[HEADER_BYTES:]


def skeleton(data: bytes) -> None:
    """A skeleton: a byte of choices, the lengths of tables and composites, then the pieces.

    Bits of the first byte: 0 no tables, 1 one segment, whose bytes follow; 2 compare with an ``into``.
    """
    if len(data) < 5:
        return
    choice, tables, composites = struct.unpack_from("<BHH", data)
    body = data[5:]
    segments: list[tuple[int, bool]] = []
    if choice & 2:
        segments.append((1 + tables % 5000, False))
        tables, body = (body[0] if body else 0), body[1:]
    if choice & 1:
        whole = b"\0" + body
    else:
        tables = min(tables, len(body))
        composites = min(composites, len(body) - tables)
        whole = struct.pack("<BII", 1, tables, composites) + body
    with watched():
        if choice & 4:
            plan = parse(whole, inline_bytes=0, segments=[], trust="restricted", max_bytes=MAX_BYTES)
            plan.targets({"a": [torch.ones(3), 1], "b": (torch.ones(2, 2),)})
            return
        build(whole, 0, segments, "restricted")


def table(data: bytes) -> None:
    """The same in cluster trust, for messages of tensors and arrays alone: nothing else is allowed to be there."""
    tables = data[1 : 1 + (data[0] if data else 0)]
    tree = data[1 + len(tables) :]
    packed = b"\x95" + tables + b"\x90\x90\xc0\x00"
    with watched(runs_nothing=False):
        build(struct.pack("<BII", 1, len(packed), 0) + packed + tree, 0, [], "cluster")


class _Store:
    """A store in which everything has the same content."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def set(self, key: str, value: str, /) -> None:
        return None

    def get(self, key: str, /) -> bytes:
        return self._content

    def check(self, keys: list[str], /) -> bool:
        return True


def store(data: bytes) -> None:
    """What others have left in the group's store: cards, refusals, notes, the roll, records of a host's ranks."""
    from objcomm import debugging
    from objcomm.transport import local_meeting

    content = _Store(data)
    answers: list[Callable[[], object]] = [
        lambda: card.terms_of(content, 1),
        lambda: card.refusal(content, 0, 1),
        lambda: card.said(content, 1),
        lambda: roll.signed(content, "00000000", 1),
        lambda: debugging.read_call(data),
    ]
    # Without the thread in which a store is asked that may not answer.
    usual = card.within
    for module in (card, roll):
        vars(module)["within"] = _at_once
    try:
        for answer in answers:
            with watched():
                try:
                    answer()
                except RuntimeError as error:
                    if isinstance(error, RecursionError):
                        raise
        with watched():
            me = local_meeting.Record(token="00")
            meeting = local_meeting.Meeting(lambda: content, "objcomm/local/0-1", 0, me)  # type: ignore[arg-type, return-value]
            try:
                theirs = meeting.look()
            except ValueError:
                theirs = None
            if theirs is not None:
                local_meeting.why_apart(me, theirs, 0, 1)
    finally:
        for module in (card, roll):
            vars(module)["within"] = usual


def _at_once(seconds: float, call: Callable[[], Any]) -> Any:
    return call()


def notice(data: bytes) -> None:
    """The skeleton of an error frame."""
    with watched():
        error: ObjcommError = error_of(unpack_notice(memoryview(data)), 3)
        str(error.locate(rank=0, peer=3, channel="c", phase="head"))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": frame,
    "skeleton": skeleton,
    "table": table,
    "store": store,
    "notice": notice,
}
