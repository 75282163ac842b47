"""One message on its way in: the window, what remains of the head, the segments, then the object."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import torch
from torch.autograd import profiler

from . import timeline
from .codec import parse
from .config import settings
from .counters import counters
from .deadline import Deadline
from .errors import (
    DecodeError,
    LimitError,
    ObjcommError,
    PeerError,
    ProtocolError,
    TransferTimeout,
    TrustError,
)
from .hostmemory import view_of
from .pair import Frame, Pair
from .transport import message_count
from .wire.frame import Body, Flag, Header, Kind, read_body, read_header
from .wire.notice import error_of, unpack_notice

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Incoming:
    """A receive. Receives of one pair complete in the order in which they were made, whoever waits first.

    Its outcome, an object or an error, is kept until somebody waits for it.
    """

    __slots__ = ("_device", "_error", "_inline", "_into", "_value", "begun", "channel", "done", "has_handle", "pair")

    def __init__(
        self, pair: Pair, channel: str, device: torch.device | None, into: object | None, *, has_handle: bool
    ) -> None:
        self.pair = pair
        self.channel = channel
        self.done = False
        self.begun = False
        self.has_handle = has_handle
        self._device = device
        self._into = into
        self._inline: Frame | None = None
        self._value: object = None
        self._error: ObjcommError | None = None

    def wait(self, deadline: Deadline) -> object:
        """Move this pair's receives on until this one is over, and return its object.

        Raises:
            PeerError, LimitError: the peer could not send, or is gone.
            ProtocolError, TrustError, DecodeError: what came is not what this rank takes.
            TransferTimeout: nothing came in time; the pair is closed.
        """
        if not self.done:
            pair = self.pair
            pair.hold_receiving(self, deadline)
            try:
                while not self.done:
                    try:
                        pair.begin_first()._receive(deadline)
                    finally:
                        pair.end_first()
            finally:
                pair.release_receiving()
        if self._error is not None:
            raise self._error
        return self._value

    def _receive(self, deadline: Deadline) -> None:
        pair = self.pair
        try:
            if pair.closed is not None:
                pair.check_open()
            self._value = self._take(deadline)
        except ObjcommError as error:
            self._error = error.locate(rank=pair.rank, peer=pair.peer, channel=self.channel)
        except BaseException:
            if self._error is None:
                pair.refuse(PeerError("interrupted while a message was being received", channel=self.channel))
                self._error = pair.closed
            raise
        finally:
            self.done = True
            self._into = None

    def _take(self, deadline: Deadline) -> object:
        pair = self.pair
        header = self._take_header(deadline)
        frame, inline = self._take_frame(header, deadline)
        try:
            body = read_body(frame, header)
        except ProtocolError as error:
            raise pair.refuse(error) from None
        if header.kind is not Kind.DATA:
            notice = unpack_notice(body.skeleton)
            if header.kind is Kind.GOODBYE:
                raise pair.close(PeerError(f"rank {pair.peer} has left: {notice.text}", phase="head"))
            raise error_of(notice, pair.peer).locate(phase="head")
        try:
            return self._take_object(header, body, inline, deadline)
        except _Refused as refused:
            self._drain(body.segments, deadline)
            raise refused.error from refused.error.__cause__

    def _take_header(self, deadline: Deadline) -> Header:
        """Wait for the window and validate the header in it. What is wrong here closes the pair."""
        pair = self.pair
        span = timeline.Span("wait") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            pair.take_window(deadline)
        except (TransferTimeout, PeerError) as error:
            raise pair.close(error.locate(channel=self.channel, phase="head")) from error
        try:
            header = read_header(pair.window_view, pair.terms())
            if header.sequence != pair.next_received:
                raise ProtocolError(
                    f"message number {header.sequence} arrived where number {pair.next_received} was due",
                    hint="something else receives from this peer on the same group",
                )
        except (ProtocolError, LimitError) as error:
            raise pair.refuse(error.locate(channel=self.channel, phase="head")) from None
        if span is not None:
            name = pair.message_name(header.sequence, sending=False)
            span.end(pair.rank, peer=pair.peer, channel=self.channel, message=name)
        pair.next_received += 1
        counters.messages_received += 1
        return header

    def _take_frame(self, header: Header, deadline: Deadline) -> tuple[memoryview, torch.Tensor]:
        """The frame up to its inline area at least, and the inline area, in memory that only this message uses."""
        pair, link = self.pair, self.pair.link
        counters.bytes_received += max(header.frame_bytes, link.window) if link.exact else header.frame_bytes
        if header.frame_bytes <= link.window:
            head = memoryview(bytes(pair.window_view[: header.inline_at]))
            if not header.inline_bytes:
                return head, _NOTHING
            self._inline = pair.borrow_frame(header.inline_bytes)
            self._inline.view[:] = pair.window_view[header.inline_at : header.frame_bytes]
            return head, self._inline.memory
        frame = self._transfer_rest(header, deadline)
        counters.messages_received += 1
        head = memoryview(bytes(view_of(frame)[: header.inline_at]))
        return head, frame[header.inline_at : header.frame_bytes]

    def _transfer_rest(self, header: Header, deadline: Deadline) -> torch.Tensor:
        pair, window = self.pair, self.pair.link.window
        try:
            frame = pair.link.allocate(header.frame_bytes, False, None)
        except (RuntimeError, MemoryError) as error:
            # The rest of the head is on its way and there is nowhere to put it: the order is lost.
            raise pair.refuse(LimitError(f"no memory for a head of {header.frame_bytes} bytes: {error}")) from None
        frame[:window] = pair.window
        span = timeline.Span("wire") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            pair.link.recv_head(frame[window:]).wait(deadline)
        except (TransferTimeout, PeerError) as error:
            raise pair.close(error.locate(channel=self.channel, phase="head")) from error
        if span is not None:
            span.end(pair.rank, peer=pair.peer, channel=self.channel, bytes=header.frame_bytes - window)
        return frame

    def _take_object(self, header: Header, body: Body, inline: torch.Tensor, deadline: Deadline) -> object:
        pair, link = self.pair, self.pair.link
        if body.channel != self.channel:
            raise _Refused(
                ProtocolError(
                    f"a message on channel {body.channel!r} arrived where one on channel {self.channel!r} was due",
                    phase="head",
                    hint="the two ranks call in a different order; this message was dropped, the next can be received",
                )
            )
        wanted = settings()
        trust = wanted.trust
        if trust == "restricted" and header.flags & Flag.OPAQUE:
            raise _Refused(
                TrustError(
                    "restricted trust refuses the pickled leaves of this message",
                    phase="decode",
                    hint="send plain data, tensors and dataclasses, or use trust='cluster' on this rank",
                )
            )
        span = timeline.Span("decode") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            plan = parse(
                body.skeleton,
                inline_bytes=header.inline_bytes,
                segments=body.segments,
                trust=trust,
                max_bytes=wanted.max_bytes,
            )
            segments: list[torch.Tensor] = []
            if body.segments or self._into is not None:
                targets = plan.targets(self._into)
                segments = [
                    link.allocate(nbytes, accelerator, self._device) if target is None else target
                    for target, (nbytes, accelerator) in zip(targets, body.segments, strict=True)
                ]
        except (DecodeError, TrustError) as error:
            raise _Refused(error.locate(phase="decode")) from error
        except Exception as error:
            raise _Refused(
                LimitError(f"no memory for the segments of this message: {error}", phase="segments")
            ) from error
        if span is not None:
            span.end(pair.rank, peer=pair.peer, channel=self.channel, bytes=len(body.skeleton))
        if segments:
            self._transfer(segments, body.segments, deadline)
        else:
            pair.post_ahead()
        span = timeline.Span("decode") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            value = plan.build(inline, segments, self._device)
        except (DecodeError, TrustError) as error:
            raise error.locate(phase="decode") from error.__cause__
        except BaseException:
            # A signal, or an exit that the code of a class asked for. The message was taken whole, so the order holds.
            self._error = DecodeError("interrupted while the object was being rebuilt", phase="decode")
            raise
        if span is not None:
            nbytes = header.frame_bytes + header.segment_bytes
            span.end(pair.rank, peer=pair.peer, channel=self.channel, bytes=nbytes)
        pair.last_received = (self.channel, header.sequence, monotonic())
        counters.objects_received += 1
        if self._inline is not None and not plan.keeps_inline:
            pair.return_frame(self._inline)
        self._inline = None
        return value

    def _transfer(self, into: list[torch.Tensor], segments: Sequence[tuple[int, bool]], deadline: Deadline) -> None:
        """Receive the segments of this message into ``into``; the next message may be on its way meanwhile."""
        pair = self.pair
        span = timeline.Span("wire") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            pending = pair.link.recv_segments(into, [accelerator for _, accelerator in segments])
            pair.post_ahead()
            pending.wait(deadline)
        except (TransferTimeout, PeerError) as error:
            raise pair.close(error.locate(channel=self.channel, phase="segments")) from error
        if span is not None:
            nbytes = sum(nbytes for nbytes, _ in segments)
            span.end(pair.rank, peer=pair.peer, channel=self.channel, bytes=nbytes)
        for nbytes, _ in segments:
            counters.messages_received += message_count(nbytes)
            counters.bytes_received += nbytes

    def _drain(self, segments: Sequence[tuple[int, bool]], deadline: Deadline) -> None:
        """Take the segments of a refused message out of the way, one at a time, so that the next message arrives."""
        pair = self.pair
        for nbytes, accelerator in segments:
            try:
                scratch = pair.link.allocate(nbytes, accelerator, None)
            except (RuntimeError, MemoryError) as error:
                raise pair.refuse(LimitError(f"no memory to receive a segment that is not wanted: {error}")) from None
            try:
                pair.link.recv_segments([scratch], [accelerator]).wait(deadline)
            except (TransferTimeout, PeerError) as error:
                raise pair.close(error.locate(channel=self.channel, phase="segments")) from error
            counters.messages_received += message_count(nbytes)
            counters.bytes_received += nbytes
        pair.post_ahead()


class _Refused(Exception):
    """This message is not wanted, but its transfers are still to come and must be taken."""

    def __init__(self, error: ObjcommError) -> None:
        super().__init__(str(error))
        self.error = error
