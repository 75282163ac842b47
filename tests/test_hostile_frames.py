"""Frames as no honest rank writes them, over every transport: a typed error, and the next object arrives if it can."""

from __future__ import annotations

import ctypes
import struct
from typing import Any
from zlib import crc32

import msgpack
import pytest
import torch

import objcomm
import tests.values  # noqa: F401  classes that the receiver has
from attacks import __main__ as attacks
from attacks.common import MAX_BYTES
from objcomm.codec import Encoded
from objcomm.deadline import Deadline
from objcomm.errors import DecodeError, ObjcommError
from objcomm.outgoing import post
from objcomm.p2p import pair_of
from objcomm.wire.frame import HEADER_BYTES, Content, Flag, Kind
from objcomm.wire.notice import Notice, pack_notice
from tests.hostile import Untouched
from tests.ranks import run_ranks

SECONDS = 20.0
TYPED = (objcomm.DecodeError, objcomm.LimitError, objcomm.ProtocolError, objcomm.TrustError, objcomm.PeerError)


class Forged(Content):
    """A message whose header is changed before it leaves."""

    __slots__ = ("changes",)

    changes: tuple[tuple[int, str, int], ...]

    def head(self, sequence: int, terms: Any) -> bytes:
        head = bytearray(super().head(sequence, terms))
        for place, form, value in self.changes:
            struct.pack_into(form, head, place, value)
        struct.pack_into("<I", head, HEADER_BYTES - 8, crc32(head[: HEADER_BYTES - 8]))
        return bytes(head)


def _post(dst: int, skeleton: bytes, inline: bytes = b"", channel: str = "", **content: Any) -> None:
    pair = pair_of(dst, None, None, "dst")
    encoded = Raw(skeleton, inline)
    changes = content.pop("changes", None)
    segments = content.pop("segments", ())
    kind = content.pop("kind", Kind.DATA)
    make: Any = Content if changes is None else Forged
    message = make(kind, content.pop("flags", 0), channel.encode(), skeleton, len(inline), segments)
    if changes is not None:
        message.changes = changes
    if segments:
        encoded.segments = [torch.zeros(content.get("sent", size), dtype=torch.uint8) for size, _ in segments]
    post(pair, message, encoded, channel, Deadline(SECONDS)).wait(Deadline(SECONDS))


class Raw(Encoded):
    """A skeleton and an inline area as they are."""

    __slots__ = ("_inline",)

    def __init__(self, skeleton: bytes, inline: bytes = b"") -> None:
        super().__init__(skeleton)
        self.inline_bytes = len(inline)
        self._inline = inline

    def write_inline_at(self, address: int) -> None:
        ctypes.memmove(address, self._inline, len(self._inline))


def _attempts() -> list[tuple[str, bytes, bytes]]:
    """What the attacks send, as long as one message may be: name, skeleton, inline area."""
    sent: list[tuple[str, bytes, bytes]] = []
    space = vars(attacks.common)
    label = ""

    def record(skeleton: bytes, *, inline_bytes: int, **_: Any) -> Any:
        sent.append((label, bytes(skeleton), bytes(inline_bytes)))
        raise DecodeError("only written down")

    parse, space["parse"] = space["parse"], record
    try:
        for label, (attack, trusts) in attacks.ALL.items():  # noqa: B007  record reads it
            try:
                attack(trusts[-1])
            except ObjcommError:
                continue
    finally:
        space["parse"] = parse
    # What is wrong with these rows is in their numbers, which are all 0 here.
    del sent[next(index for index, each in enumerate(sent) if each[0] == "jagged_rows_whose_sum_overflows")]
    return [each for each in sent if len(each[1]) + len(each[2]) < MAX_BYTES - 4096]


@pytest.mark.parametrize("trust", ["restricted", "cluster"])
def test_every_skeleton_of_the_attacks_is_refused_and_the_next_object_arrives(backend: str, trust: str) -> None:
    def ranks(rank: int) -> None:
        objcomm.configure(trust="restricted" if trust == "restricted" else "cluster")
        sent = [each for each in _attempts() if trust in attacks.ALL[each[0]][1]]
        assert len(sent) > 25
        untouched = Untouched()
        if rank == 0:
            objcomm.send_object("first", 1)
            for _, skeleton, inline in sent:
                _post(1, skeleton, inline)
                objcomm.send_object({"after": torch.ones(3)}, 1)
            return
        objcomm.recv_object(0)
        for name, _, _ in sent:
            if trust == "restricted":
                with untouched.watching(), pytest.raises(TYPED):
                    objcomm.recv_object(0)
            else:
                with pytest.raises(TYPED):
                    objcomm.recv_object(0)
            assert set(objcomm.recv_object(0)) == {"after"}, name

    run_ranks(ranks, backend=backend, env={"OBJCOMM_MAX_BYTES": str(MAX_BYTES)}, timeout=150)


HEADERS: dict[str, tuple[tuple[int, str, int], ...]] = {
    "a skeleton of 2 ** 62 bytes": ((16, "<Q", 1 << 62),),
    "a skeleton of more bytes than there are": ((16, "<Q", 200_000),),
    "an inline area of 2 ** 63 bytes": ((24, "<Q", 1 << 63),),
    "segments that are not in the table": ((32, "<Q", 1 << 62),),
    "a table of 4 billion segments": ((40, "<I", (1 << 32) - 1),),
    "a channel of 60,000 bytes": ((44, "<H", 60_000),),
    "another kind": ((5, "<B", 9),),
    "a goodbye that is too long": ((5, "<B", 3), (16, "<Q", 1 << 20)),
    "an error with segments": ((5, "<B", 2), (32, "<Q", 1 << 40)),
    "another number": ((8, "<Q", 1 << 50),),
    "another version": ((4, "<B", 7),),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header_closes_the_pair_on_both_ends(name: str) -> None:
    """It is refused before anything is allocated; the sender learns why, and nobody waits for its time-out."""

    refusals: tuple[type[ObjcommError], ...] = (objcomm.ProtocolError, objcomm.LimitError, objcomm.PeerError)
    if "more bytes than there are" in name:  # they may still come
        refusals = (*refusals, objcomm.TransferTimeout)

    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object("first", 1)
            with pytest.raises(refusals):
                _post(1, b"\0\xc0", changes=HEADERS[name])
                objcomm.recv_object(1, timeout=5)
        else:
            assert objcomm.recv_object(0) == "first"
            with pytest.raises(refusals):
                objcomm.recv_object(0, timeout=5)
            with pytest.raises(ObjcommError):
                objcomm.recv_object(0, timeout=5)

    run_ranks(ranks, backend="gloo" if len(name) % 2 else "local", timeout=60)


def _bundle(index: Any, rest: bytes = b"") -> bytes:
    packed = msgpack.packb(index) if not isinstance(index, bytes) else index
    return struct.pack("<BI", 2, len(packed)) + packed + rest


NONE = b"\0\xc0"
BUNDLES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "flags that are no number": (_bundle([[0, 1.5, 2, 0]], NONE), {}),
    "a size that is no number": (_bundle([[0, 0, 2.0, 0]], NONE), {}),
    "a rank that is none": (_bundle([["0", 0, 2, 0]], NONE), {}),
    "a rank of another universe": (_bundle([[99, 0, 2, 0]], NONE), {}),
    "more skeleton than there is": (_bundle([[0, 0, 1 << 40, 0]], NONE), {}),
    "an inline area that is not there": (_bundle([[0, 0, 2, 64]], NONE), {}),
    "a negative size": (_bundle([[0, 0, -2, 0]], NONE), {}),
    "an index of lists in lists": (_bundle(b"\xdd\x00\xff\xff\xff" * 3000), {}),
    "an index that is a map": (_bundle({"a": 1}), {}),
    "no index": (struct.pack("<BI", 2, 1 << 31), {}),
    "a notice that is none": (_bundle([[0, b"\x93\x01\x02\x03"]]), {}),
    "a notice of lists in lists": (_bundle([[0, b"\x91" * 2000]]), {}),
    "segments and no object": (_bundle([]), {"segments": [(1000, False)], "flags": Flag.CHUNKED}),
    "segments and two objects": (
        _bundle([[0, 0, 2, 0], [1, 0, 2, 0]], NONE * 2),
        {"segments": [(1000, False)], "flags": Flag.CHUNKED},
    ),
    "no bundle at all": (NONE, {}),
}


def test_a_damaged_bundle_is_a_typed_error_and_the_next_object_arrives(backend: str) -> None:
    def ranks(rank: int) -> None:
        channel = "<broadcast from 0> "
        for _ in range(2):
            objcomm.broadcast_object("first", 0)
        for name, (skeleton, more) in BUNDLES.items():
            if rank == 0:
                # What rank 0 of a broadcast does, but for what it sends: it takes an empty bundle first.
                pair = pair_of(1, None, None, "dst")
                with pytest.raises(objcomm.ObjcommError):
                    objcomm.recv_object(1, channel=channel)  # an object is no bundle
                assert pair.closed is None
                _post(1, skeleton, channel=channel, **more)
                objcomm.send_object(["after", name], 1)
            else:
                with pytest.raises(TYPED):
                    objcomm.broadcast_object(None, 0, timeout=SECONDS)
                assert objcomm.recv_object(0) == ["after", name]

    run_ranks(ranks, backend=backend, timeout=150)


def test_a_notice_is_no_code(backend: str) -> None:
    """Whatever it names, what is raised is one of objcomm's own errors, with what came as its text."""

    def ranks(rank: int) -> None:
        names = ["SystemExit", "KeyboardInterrupt", "os.system", "TrustError", "LimitError", "__import__('os')", ""]
        for name in names:
            if rank == 0:
                _post(1, pack_notice(Notice(name, "why {0} %s " + "x" * 5000, "obj" + "[0]" * 500)), kind=Kind.ERROR)
                objcomm.send_object("after", 1)
            else:
                with pytest.raises((objcomm.PeerError, objcomm.LimitError)):
                    objcomm.recv_object(0)
                assert objcomm.recv_object(0) == "after"
        for skeleton in (b"", b"\xc0", b"\x91" * 3000, b"\xdd\xff\xff\xff\xff", b"\x93\xa1a\xa1b\x01"):
            if rank == 0:
                _post(1, skeleton, kind=Kind.ERROR)
                objcomm.send_object("after", 1)
            else:
                with pytest.raises(objcomm.ProtocolError, match="notice"):
                    objcomm.recv_object(0)
                assert objcomm.recv_object(0) == "after"

    run_ranks(ranks, backend=backend)


def test_a_peer_that_sends_less_than_it_announces_shows_nothing_of_this_ranks_memory() -> None:
    """gloo does not say how much has arrived. So in restricted trust the memory is cleared before."""
    nbytes = 1 << 20

    def ranks(rank: int) -> None:
        whole = objcomm.codec.encode(torch.full((nbytes,), 7, dtype=torch.uint8))
        if rank == 0:
            for _ in range(3):
                objcomm.send_object(torch.full((nbytes,), 7, dtype=torch.uint8), 1)
                _post(1, whole.skeleton, segments=[(nbytes, False)], sent=16)
            objcomm.send_object("after", 1)
            return
        objcomm.configure(trust="restricted")
        for _ in range(3):
            assert objcomm.recv_object(0).sum() == 7 * nbytes  # memory that will be used again
            short = objcomm.recv_object(0)
            assert short.shape == (nbytes,) and not short.any()
            del short
        assert objcomm.recv_object(0) == "after"

    run_ranks(ranks, backend="gloo")
