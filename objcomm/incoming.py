"""One message on its way in: the window, what remains of the head, the segments, then the object."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import torch
from torch.autograd import profiler

from . import timeline
from .codec import Plan, parse
from .config import Trust, is_restricted_here, settings
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
from .hostmemory import Frame, view_of
from .pair import Pair
from .segments import Refused, drain, receive_segments
from .wire.frame import Body, Flag, Header, Kind, read_body, read_header
from .wire.notice import error_of, unpack_notice

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Incoming:
    """A receive. Receives of one pair complete in the order in which they were made, whoever waits first.

    Its outcome, an object or an error, is kept until somebody waits for it.
    """

    __slots__ = (
        *("_device", "_error", "_inline", "_into", "_restricted", "_value"),
        *("begun", "channel", "done", "has_handle", "pair", "requiring_grad", "sequence"),
    )

    def __init__(
        self,
        pair: Pair,
        channel: str,
        device: torch.device | None,
        into: object | None,
        *,
        has_handle: bool,
        track_grad: bool = False,
    ) -> None:
        self.pair = pair
        self.channel = channel
        self.done = False
        self.begun = False
        self.has_handle = has_handle
        # Once it is done: the tensors of the object that require grad, if somebody wants to know; see Plan.
        self.requiring_grad: dict[int, torch.Tensor] | None = {} if track_grad else None
        self.sequence = -1
        self._device = device
        self._into = into
        self._restricted = is_restricted_here()
        self._inline: Frame | None = None
        self._value: object = None
        self._error: ObjcommError | None = None

    def post(self) -> None:
        """Take a place among the receives of the pair. What is wrong with the pair is raised by :meth:`wait`."""
        try:
            self.pair.expect(self)
        except ObjcommError as error:
            if self not in self.pair.posted:
                self._error = error.locate(rank=self.pair.rank, peer=self.pair.peer, channel=self.channel)
                self.done = True

    def wait(self, deadline: Deadline) -> object:
        """Move this pair's receives on until this one is over, and return its object.

        Raises:
            PeerError, LimitError: the peer could not send, or is gone.
            ProtocolError, TrustError, DecodeError: what came is not what this rank takes.
            TransferTimeout: nothing came in time; the pair is closed.
        """
        if not self.done:
            pair = self.pair
            if pair.hold_receiving(self, deadline):
                try:
                    while not self.done:
                        take_one(pair, deadline)
                finally:
                    pair.release_receiving()
        if self._error is not None:
            raise self._error
        return self._value

    def receive(self, deadline: Deadline) -> None:
        """Take one message off the pair, which is this one's, unless it is one that has a mailbox."""
        pair = self.pair
        mine = True
        try:
            if pair.closed is not None:
                pair.check_open()
            mine = self._take(deadline)
        except ObjcommError as error:
            self._error = error.locate(rank=pair.rank, peer=pair.peer, channel=self.channel)
        except BaseException:
            if self._error is None:
                pair.refuse(PeerError("interrupted while a message was being received", channel=self.channel))
                self._error = pair.closed
            raise
        finally:
            if mine:
                self.done = True
                self._into = None

    def _hand_over(self, header: Header, body: Body, inline: torch.Tensor, deadline: Deadline) -> None:
        pair = self.pair
        other = Incoming(pair, body.channel, None, None, has_handle=False)
        other._inline, self._inline = self._inline, None
        other._restricted = other._restricted or self._restricted
        try:
            other._value = other._open(header, body, inline, deadline)
        except ObjcommError as error:
            other._error = error.locate(rank=pair.rank, peer=pair.peer, channel=body.channel)
        other.done = True
        pair.mailbox.deliver(other)

    def _take(self, deadline: Deadline) -> bool:
        """Take a message, and set the value; False if it was not this one's."""
        return self._take_message(self._take_header(deadline), deadline)

    def _take_message(self, header: Header, deadline: Deadline) -> bool:
        pair = self.pair
        frame, inline = self._take_frame(header, deadline)
        try:
            body = read_body(frame, header)
        except ProtocolError as error:
            raise pair.refuse(error) from None
        mailbox = pair.mailbox
        if (
            mailbox is not None
            and body.channel == mailbox.channel
            and body.channel != self.channel
            and header.kind is not Kind.GOODBYE
        ):
            self._hand_over(header, body, inline, deadline)
            return False
        self._value = self._open(header, body, inline, deadline)
        return True

    def _open(self, header: Header, body: Body, inline: torch.Tensor, deadline: Deadline) -> object:
        pair = self.pair
        if header.kind is not Kind.DATA:
            notice = unpack_notice(body.skeleton)
            if header.kind is Kind.GOODBYE:
                raise pair.close(PeerError(f"rank {pair.peer} has left: {notice.text}", phase="head"))
            raise error_of(notice, pair.peer).locate(phase="head")
        try:
            return self._take_object(header, body, inline, deadline)
        except Refused as refused:
            drain(self.pair, body.segments, header.flags, self.channel, deadline)
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
        self.sequence = header.sequence
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
        rest = self._clear(frame[window:])
        span = timeline.Span("wire") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            pair.link.recv_head(rest).wait(deadline)
        except (TransferTimeout, PeerError) as error:
            raise pair.close(error.locate(channel=self.channel, phase="head")) from error
        if span is not None:
            span.end(pair.rank, peer=pair.peer, channel=self.channel, bytes=header.frame_bytes - window)
        return frame

    def _take_object(self, header: Header, body: Body, inline: torch.Tensor, deadline: Deadline) -> object:
        self._check_channel(body)
        plan, segments = self._admit(header.flags, body.skeleton, header.inline_bytes, body.segments)
        if segments:
            receive_segments(self.pair, segments, body.segments, self.channel, deadline)
        else:
            self.pair.post_ahead()
        return self._build(plan, inline, segments)

    def _admit(
        self, flags: int, skeleton: memoryview | bytes, inline_bytes: int, segments: Sequence[tuple[int, bool]]
    ) -> tuple[Plan, list[torch.Tensor]]:
        """Look at an object before anything of it is built, and find memory for its segments."""
        trust = self._trust()
        if trust == "restricted" and flags & Flag.OPAQUE:
            raise Refused(
                TrustError(
                    "restricted trust refuses the pickled leaves of this message",
                    phase="decode",
                    hint="send plain data, tensors and dataclasses, or use trust='cluster' on this rank",
                )
            )
        try:
            plan = parse(
                skeleton, inline_bytes=inline_bytes, segments=segments, trust=trust, max_bytes=settings().max_bytes
            )
            if not segments and self._into is None:
                return plan, []
            return plan, [
                self._allocate(nbytes, accelerator) if target is None else target
                for target, (nbytes, accelerator) in zip(plan.targets(self._into), segments, strict=True)
            ]
        except (DecodeError, LimitError, TrustError) as error:
            raise Refused(error.locate(phase="decode")) from error
        except Exception as error:
            raise Refused(
                LimitError(f"no memory for the segments of this message: {error}", phase="segments")
            ) from error

    def _allocate(self, nbytes: int, accelerator: bool) -> torch.Tensor:
        return self._clear(self.pair.link.allocate(nbytes, accelerator, self._device))

    def _clear(self, memory: torch.Tensor) -> torch.Tensor:
        """A peer that sends less than it announces must not have what was in this memory before shown as its data."""
        return memory.zero_() if self._trust() == "restricted" and not self.pair.link.measured else memory

    def _trust(self) -> Trust:
        return "restricted" if self._restricted else settings().trust

    def _build(self, plan: Plan, inline: torch.Tensor, segments: Sequence[torch.Tensor]) -> object:
        span = timeline.Span("decode") if timeline.active is not None or profiler._is_profiler_enabled else None
        try:
            value = plan.build(inline, segments, self._device)
        except (DecodeError, LimitError, TrustError) as error:
            raise error.locate(phase="decode") from error.__cause__
        except BaseException:
            # A signal, or an exit that the code of a class asked for. The message was taken whole, so the order holds.
            self._error = DecodeError("interrupted while the object was being rebuilt", phase="decode")
            raise
        if self.requiring_grad is not None:
            self.requiring_grad = plan.requiring_grad()
        if span is not None:
            span.end(self.pair.rank, peer=self.pair.peer, channel=self.channel)
        self.pair.last_received = (self.channel, self.sequence, monotonic())
        counters.objects_received += 1
        if self._inline is not None and not plan.keeps_inline:
            self.pair.return_frame(self._inline)
        self._inline = None
        return value

    def _check_channel(self, body: Body) -> None:
        if body.channel != self.channel:
            raise Refused(
                ProtocolError(
                    f"a message on channel {body.channel!r} arrived where one on channel {self.channel!r} was due",
                    phase="head",
                    hint="the two ranks call in a different order; this message was dropped, the next can be received",
                )
            )


def take_one(pair: Pair, deadline: Deadline) -> None:
    """Take the next message off a pair, for the first receive that is posted; the receiving direction is held."""
    first = pair.begin_first()
    try:
        first.receive(deadline)
    finally:
        if first.done:
            pair.end_first()
