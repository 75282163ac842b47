"""One message to several peers, or passed on by one that received it: the same bytes but for their number.

A large CPU segment of such a message travels in chunks, so that it is on its way to the next rank while the rest of it
still arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .codec import Encoded
from .counters import counters
from .deadline import Deadline
from .errors import ObjcommError, PeerError
from .hostmemory import view_of
from .outgoing import Outgoing, post
from .pair import Pair
from .transport import message_count
from .wire.bundle import Parcel, pack_bundle
from .wire.frame import Content, Flag, Kind, renumber


class Piece(NamedTuple):
    """A parcel and what its inline area is filled from: what was encoded here, or arrived."""

    parcel: Parcel
    inline: Encoded | torch.Tensor | None


class Joined(Encoded):
    """Several parcels as what one message carries."""

    __slots__ = ("_pieces", "_places")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        skeleton, self._places, inline_bytes = pack_bundle([piece.parcel for piece in pieces])
        super().__init__(skeleton)
        self.inline_bytes = inline_bytes
        self._pieces = pieces

    def write_inline_at(self, address: int) -> None:
        for piece, place in zip(self._pieces, self._places, strict=True):
            if isinstance(piece.inline, Encoded):
                piece.inline.write_inline_at(address + place)
            elif piece.inline is not None:
                ctypes.memmove(address + place, piece.inline.data_ptr(), piece.parcel.inline_bytes)

    def content(self, name: bytes, segments: Sequence[tuple[int, bool]] = ()) -> Content:
        """The bundle as a message; ``segments`` of its one object follow it in chunks."""
        flags = Flag.CHUNKED if segments else 0
        return Content(Kind.DATA, flags, name, self.skeleton, self.inline_bytes, segments)


NOTHING = Joined(())


@functools.lru_cache(maxsize=128)
def content_of_nothing(name: bytes) -> Content:
    return NOTHING.content(name)


def send_bundle(pair: Pair, pieces: Sequence[Piece], name: bytes, channel: str, deadline: Deadline) -> Outgoing:
    """Post a bundle to one peer."""
    if not pieces:
        return post(pair, content_of_nothing(name), NOTHING, channel, deadline)
    joined = Joined(pieces)
    return post(pair, joined.content(name), joined, channel, deadline)


class Relay:
    """A message on its way to one peer, whose head is posted and whose segments are added as they come.

    It holds the sending direction from the first transfer to the last: see :mod:`objcomm.pair`.
    """

    __slots__ = ("_error", "_held", "outgoing", "pair")

    def __init__(self, pair: Pair, frame: torch.Tensor, channel: str, deadline: Deadline) -> None:
        self.pair = pair
        self._error: ObjcommError | None = None
        pair.check_open()
        pair.terms()
        pair.hold_sending(deadline)
        self._held = True
        with self._failing(channel, "send"):
            window, nbytes = pair.link.window, frame.numel()
            first = pair.borrow_frame(window if pair.link.exact else min(window, nbytes))
            beginning = min(window, nbytes)
            first.view[:beginning] = view_of(frame)[:beginning]
            renumber(first.view, pair.next_sent)
            self.outgoing = Outgoing(pair, channel, pair.next_sent, frame, first)
            pair.in_flight[pair.next_sent] = self.outgoing
            self.outgoing.pendings.append(("head", pair.link.send_head(first.memory)))
            counters.messages_sent += 1
            counters.bytes_sent += max(first.nbytes, nbytes)
            if nbytes > window:
                self.outgoing.pendings.append(("head", pair.link.send_head(frame[window:])))
                counters.messages_sent += 1

    def add(self, chunk: torch.Tensor) -> None:
        """Post one chunk of a segment. What is wrong with this peer is kept for :meth:`finish`."""
        if self._error is not None:
            return
        try:
            with self._failing(self.outgoing.channel, "segments"):
                self.outgoing.pendings.append(("segments", self.pair.link.send_segments([chunk])))
        except ObjcommError as error:
            self._error = error
            return
        counters.messages_sent += message_count(chunk.numel())
        counters.bytes_sent += chunk.numel()

    def finish(self) -> Outgoing:
        """All is posted.

        Raises:
            PeerError: the peer is gone; the pair is closed.
        """
        if self._held:
            self._held = False
            self.pair.next_sent += 1
            self.pair.sending.release()
        if self._error is not None:
            raise self._error
        return self.outgoing

    def abandon(self, error: ObjcommError) -> None:
        """What is missing will not come: the peer must not wait for it."""
        if self._held:
            self._held = False
            self.pair.close(error)
            self.pair.sending.release()
            self.pair.link.close()

    @contextlib.contextmanager
    def _failing(self, channel: str, phase: str) -> Iterator[None]:
        try:
            yield
        except ObjcommError as error:
            self._held = False
            self.pair.close(error.locate(channel=channel, phase=phase))
            self.pair.sending.release()
            raise
        except BaseException:
            self.abandon(PeerError("interrupted while a message was being posted", channel=channel, phase=phase))
            raise


def spread(
    pairs: Sequence[Pair],
    content: Content,
    encoded: Encoded,
    chunks: Sequence[torch.Tensor],
    channel: str,
    deadline: Deadline,
    failed: Callable[[ObjcommError, Pair], None],
) -> list[Outgoing]:
    """Post one message to several peers; ``chunks`` are its segments as they travel. Whoever is gone is ``failed``."""
    if not chunks and content.frame_bytes <= pairs[0].link.window:
        outgoings = []
        for pair in pairs:
            try:
                outgoings.append(post(pair, content, encoded, channel, deadline))
            except ObjcommError as error:
                failed(error, pair)
        return outgoings
    # What is beyond the window is sent to all from one place.
    frame = pairs[0].link.allocate(content.frame_bytes, False, None)
    head = content.head(0, pairs[0].terms())
    view_of(frame)[: len(head)] = head
    if encoded.inline_bytes:
        encoded.write_inline_at(frame.data_ptr() + content.inline_at)
    relays: list[Relay] = []
    try:
        for pair in pairs:
            try:
                relays.append(Relay(pair, frame, channel, deadline))
            except ObjcommError as error:
                failed(error, pair)
        for chunk in chunks:
            for one in relays:
                one.add(chunk)
    except BaseException:
        for one in relays:
            one.abandon(PeerError("interrupted while a message was being posted", channel=channel, phase="send"))
        raise
    return finish(relays, failed)


def finish(relays: Sequence[Relay], failed: Callable[[ObjcommError, Pair], None]) -> list[Outgoing]:
    """All is posted."""
    outgoings = []
    for one in relays:
        try:
            outgoings.append(one.finish())
        except ObjcommError as error:
            failed(error, one.pair)
    return outgoings
