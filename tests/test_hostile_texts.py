"""Texts of others: in the store of a group, in notices, in traces. Typed errors, and nothing for a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from objcomm import debugging
from objcomm.cli.tracing_merge import TraceError, load
from objcomm.errors import ProtocolError
from objcomm.transport.local_meeting import Meeting, Record
from objcomm.wire import card, roll
from objcomm.wire.frame import Terms
from objcomm.wire.notice import Notice, error_of, pack_notice, unpack_notice


class Store:
    """Everything in it has the same content."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def set(self, key: str, value: str, /) -> None:
        raise AssertionError("nothing is written")

    def get(self, key: str, /) -> bytes:
        return self.content

    def check(self, keys: list[str], /) -> bool:
        return True

    def delete_key(self, key: str, /) -> bool:
        raise AssertionError("nothing is removed")


BAD = [
    *(b"", b"null", b"[]", b"{}", b"17", b"\xff\xfe", b"[" * 4000, b'{"a":' * 600, b"x" * 5000, b"NaN"),
    b'{"window": Infinity, "max_bytes": 1, "version": 1}',
    b'{"window": "x", "max_bytes": 1, "version": 1}',
    b'{"window": [1], "max_bytes": 1, "version": 1}',
    b'{"token": 5}',
    b'{"token": "zz"}',
    b'{"token": "' + b"a" * 66 + b'"}',
    b'{"token": "' + b"ab" * 16 + b'", "user": "root"}',
    b'["send_object", "dst=1"]',
    b'["send_object", "dst=1", 5]',
]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_what_lies_in_the_store_may_be_anything(content: bytes) -> None:
    store = Store(content)
    with pytest.raises(ProtocolError):
        card.terms_of(store, 1)
    with pytest.raises(ProtocolError):
        debugging.read_call(content)
    with pytest.raises(ValueError):
        Meeting(lambda: store, "objcomm/local/0-1", 0, Record("ab" * 16)).look()
    if content and content != b"17":
        with pytest.raises(RuntimeError):
            roll.signed(store, "00", 1)


def test_what_an_honest_rank_leaves_is_read() -> None:
    store = Store(json.dumps({"rank": 1, "version": 1, "window": 65536, "max_bytes": 5}).encode())
    assert card.terms_of(store, 1) == Terms(65536, 5)
    store = Store(json.dumps({"token": "ab" * 16, "user": 3}).encode())
    assert Meeting(lambda: store, "objcomm/local/0-1", 0, Record("")).look() == Record("ab" * 16, user=3)
    assert debugging.read_call(b'["send_object", "dst=1", "train.py:3"]').call == "send_object"
    assert roll.signed(Store(b"17"), "00", 1) == 17


def test_nothing_that_a_terminal_would_obey_is_shown() -> None:
    wild = "a\x1b[2J\x07\x9b1mb\n\tc"
    tame = "a\\x1b[2J\\x07\\x9b1mb\n\tc"
    store = Store(wild.encode())
    assert card.said(store, 1) == card.refusal(store, 0, 1) == tame
    text = str(error_of(unpack_notice(memoryview(pack_notice(Notice(wild, wild, wild)))), 1))
    assert tame in text and not set(text) & {"\x1b", "\x07", "\x9b"}
    plain = Notice("Übel", "ein Satz, mit 数字", "obj['ä']", 3)
    assert unpack_notice(memoryview(pack_notice(plain))) == plain


CLOCK = {"ph": "M", "name": "objcomm_clock", "pid": 0, "args": {"clock": "c", "wall_us": 5.0, "ts": 1.0}}


@pytest.mark.parametrize(
    "events",
    [
        [{**CLOCK, "args": [1]}],
        [{**CLOCK, "args": {"clock": ["c"], "wall_us": 5.0, "ts": 1.0}}],
        [{**CLOCK, "args": {"clock": "c", "wall_us": "5", "ts": 1.0}}],
        [{**CLOCK, "pid": "0"}],
        [CLOCK, {"ph": "X", "name": ["post"], "args": {}}],
        [CLOCK, {"ph": "X", "name": "post", "args": {"message": ["m"]}}],
        [CLOCK, {"ph": "X", "name": "post", "ts": "now"}],
        [CLOCK, {"ph": "X", "name": "post", "dur": None}],
        [CLOCK, 5],
        "lists in lists",
    ],
)
def test_a_trace_may_hold_anything(events: Any, tmp_path: Path) -> None:
    text = "[" * 100_000 if events == "lists in lists" else json.dumps(events)
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(TraceError, match="damaged"):
        load(tmp_path)
    (tmp_path / "rank-0.json").write_text(json.dumps([CLOCK]))
    assert [rank.clock for rank in load(tmp_path)] == ["c"]
