"""The head frame, the notices and the cards, without any rank."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objcomm.errors import EncodeError, LimitError, PeerError, ProtocolError, UsageError
from objcomm.wire import card
from objcomm.wire.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    MIN_WINDOW,
    Content,
    Flag,
    Kind,
    Terms,
    agree,
    channel_name,
    frame_layout,
    read_body,
    read_header,
)
from objcomm.wire.notice import Notice, error_of, notice_of, pack_notice, unpack_notice

TERMS = Terms(window=65536, max_bytes=1 << 30)


def make(
    skeleton: bytes = b"skeleton",
    inline: bytes = b"",
    segments: tuple[tuple[int, bool], ...] = (),
    channel: str = "adapter41",
    sequence: int = 5,
    kind: Kind = Kind.DATA,
    terms: Terms = TERMS,
) -> bytearray:
    name = channel_name(channel)
    content = Content(kind, Flag.OPAQUE, name, skeleton, len(inline), segments)
    frame = bytearray(content.frame_bytes)
    head = content.head(sequence, terms)
    frame[: len(head)] = head
    frame[content.inline_at :] = inline
    return frame


def resign(frame: bytearray) -> bytearray:
    """Make the header's checksum right again after a change, as a forger would."""
    struct.pack_into("<I", frame, HEADER_BYTES - 8, zlib.crc32(frame[: HEADER_BYTES - 8]))
    return frame


@given(
    skeleton=st.binary(max_size=300),
    inline=st.binary(max_size=300),
    segments=st.lists(st.tuples(st.integers(1, 1 << 20), st.booleans()), max_size=9).map(tuple),
    channel=st.text(max_size=40),
    sequence=st.integers(0, 2**64 - 1),
)
def test_what_is_written_is_read(
    skeleton: bytes, inline: bytes, segments: tuple[tuple[int, bool], ...], channel: str, sequence: int
) -> None:
    frame = make(skeleton, inline, segments, channel, sequence)
    header = read_header(memoryview(frame), TERMS)
    body = read_body(memoryview(frame), header)
    assert (header.kind, header.flags, header.sequence) == (Kind.DATA, Flag.OPAQUE, sequence)
    assert (body.channel, body.segments, bytes(body.skeleton)) == (channel, segments, skeleton)
    assert header.frame_bytes == len(frame)
    assert header.segment_bytes == sum(size for size, _ in segments)
    assert frame[header.inline_at :] == inline
    assert not inline or header.inline_at % ALIGNMENT == 0


@given(data=st.data())
def test_every_damaged_bit_in_front_of_the_inline_area_is_found(data: Any) -> None:
    frame = make(b"some skeleton", b"", ((1 << 20, False),))
    place = data.draw(st.integers(0, len(frame) * 8 - 1))
    # The last four bytes of the header are reserved: they carry nothing.
    if HEADER_BYTES - 4 <= place // 8 < HEADER_BYTES:
        return
    frame[place // 8] ^= 1 << place % 8
    with pytest.raises(ProtocolError):
        read_body(memoryview(frame), read_header(memoryview(frame), TERMS))


@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_header(memoryview(noise), TERMS)


@pytest.mark.parametrize(
    ("offset", "code", "value"),
    [
        (16, "<Q", 1 << 62),  # skeleton bytes
        (24, "<Q", 1 << 62),  # inline bytes
        (32, "<Q", (1 << 64) - 1),  # segment bytes
        (40, "<I", (1 << 32) - 1),  # segment count
    ],
)
def test_forged_sizes_are_refused_by_the_header_alone(offset: int, code: str, value: int) -> None:
    frame = make()
    struct.pack_into(code, frame, offset, value)
    with pytest.raises(LimitError, match="max_bytes"):
        read_header(memoryview(resign(frame)), TERMS)


def test_a_forged_segment_total_contradicts_the_table() -> None:
    frame = make(segments=((4096, False),))
    struct.pack_into("<Q", frame, 32, 8192)
    header = read_header(memoryview(resign(frame)), TERMS)
    with pytest.raises(ProtocolError, match="contradict"):
        read_body(memoryview(frame), header)


def test_a_notice_longer_than_the_window_is_refused() -> None:
    frame = make(b"x" * 5000, kind=Kind.ERROR, terms=Terms(MIN_WINDOW, 1 << 30))
    with pytest.raises(ProtocolError, match="longer than allowed"):
        read_header(memoryview(frame), Terms(MIN_WINDOW, 1 << 30))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (Terms(65536, 1 << 20), ("max_bytes", str(1 << 20), str(1 << 30))),
        (Terms(4096, 1 << 30), ("window", "4096", "65536")),
        (Terms(65536, 1 << 30, version=9), ("version", "9", "1")),
    ],
)
def test_other_terms_are_refused_naming_both(theirs: Terms, named: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError) as of_head:
        read_header(memoryview(make(terms=theirs)), TERMS)
    with pytest.raises(ProtocolError) as of_card:
        agree(TERMS, theirs)
    for word in named:
        assert word in str(of_head.value)
        assert word in str(of_card.value)


def test_an_error_frame_is_heard_under_other_terms() -> None:
    frame = make(kind=Kind.ERROR, terms=Terms(65536, 77))
    assert read_header(memoryview(frame), TERMS).kind == Kind.ERROR


def test_a_channel_has_a_limit() -> None:
    with pytest.raises(UsageError, match="1024"):
        channel_name("c" * 1025)
    for wrong in (None, 5, b"c"):
        with pytest.raises(UsageError, match="must be a string"):
            channel_name(wrong)  # type: ignore[arg-type]


def test_notices() -> None:
    notice = notice_of(EncodeError("a lock cannot be pickled", path="obj['lock']"))
    assert unpack_notice(memoryview(pack_notice(notice))) == notice
    error = error_of(notice, peer=3)
    assert type(error) is PeerError
    assert error.path == "obj['lock']"
    assert "rank 3" in str(error) and "a lock cannot be pickled" in str(error) and "EncodeError" in str(error)
    assert type(error_of(notice_of(LimitError("too large")), 0)) is LimitError
    assert notice_of(KeyboardInterrupt()).text == "KeyboardInterrupt"


@given(st.text(max_size=3000), st.text(max_size=900))
def test_a_notice_fits_in_the_smallest_window(text: str, path: str) -> None:
    packed = pack_notice(Notice("EncodeError", text * 3, path))
    assert frame_layout(1024 + len(packed), 0)[1] <= MIN_WINDOW
    assert unpack_notice(memoryview(packed)).error == "EncodeError"


@given(st.binary(max_size=60))
def test_noise_is_no_notice(noise: bytes) -> None:
    try:
        fields = unpack_notice(memoryview(noise))
    except ProtocolError:
        return
    assert isinstance(fields.text, str)


class DictStore:
    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.entries[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)


def test_cards_and_refusals() -> None:
    store = DictStore()
    assert card.terms_of(store, 2) is None
    card.publish(store, 2, TERMS)
    assert card.terms_of(store, 2) == TERMS
    assert card.refusal(store, rank=0, peer=1) is None
    card.refuse(store, rank=1, peer=0, reason="not ours")
    assert card.refusal(store, rank=0, peer=1) == "not ours"
    assert card.refusal(store, rank=1, peer=0) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": "x"}', "\xff", "9" * 5000])
def test_a_broken_card_is_refused(text: str) -> None:
    store = DictStore()
    store.set("objcomm/card/1", text)
    with pytest.raises(ProtocolError):
        card.terms_of(store, 1)
