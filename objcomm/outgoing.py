"""One message on its way out: all is encoded before the first byte leaves, then every transfer is posted at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from torch.autograd import profiler

from . import timeline
from .codec import Encoded, encode
from .config import settings, trust_here
from .counters import counters
from .deadline import Deadline
from .errors import LimitError, ObjcommError, PeerError
from .hostmemory import Frame
from .pair import Pair
from .transport import Pending, message_count
from .wire.frame import Content, Flag, Kind, channel_name
from .wire.notice import Notice, notice_of, pack_notice


class Outgoing:
    """A message whose transfers are posted. It owns the frame and keeps alive what the segments point into."""

    __slots__ = ("_encoded", "_frame", "_waiting", "channel", "pair", "pendings", "sequence")

    def __init__(self, pair: Pair, channel: str, sequence: int, encoded: object, frame: Frame) -> None:
        self.pair = pair
        self.channel = channel
        self.sequence = sequence
        # What the transfers read from beside the frame; None when they are over.
        self._encoded: object | None = encoded
        self._frame = frame
        self._waiting = threading.Lock()
        # In the order of posting, with the phase that each belongs to.
        self.pendings: list[tuple[str, Pending]] = []

    def wait(self, deadline: Deadline) -> None:
        """Block until the caller's memory is no longer needed.

        Raises:
            TransferTimeout, PeerError, ProtocolError: located, after closing the pair.
        """
        if self._encoded is None:
            return
        # A backend may count completions: of two threads that wait for one transfer, the second would wait for ever.
        if not self._waiting.acquire(timeout=deadline.remaining()):
            raise self.pair.busy("waiting for this send to")
        try:
            if self._encoded is not None:
                self._wait(deadline)
        finally:
            self._waiting.release()

    def _wait(self, deadline: Deadline) -> None:
        pair = self.pair
        span = timeline.Span("wait") if timeline.active is not None or profiler._is_profiler_enabled else None
        for phase, pending in self.pendings:
            try:
                pending.wait(deadline)
            except ObjcommError as error:
                raise pair.close(error.locate(channel=self.channel, phase=phase)) from error
            if not pair.agreed:
                pair.check_agreement()
        if span is not None:
            span.end(pair.rank, peer=pair.peer, channel=self.channel, until="it was taken")
        self._encoded = None
        self.pendings = []
        in_flight = pair.in_flight
        del in_flight[self.sequence]
        pair.last_sent = (self.channel, self.sequence, monotonic())
        pair.return_frame(self._frame)
        if in_flight:
            # Messages complete in order, so those before this one are over as well: let go of their memory.
            for sequence in [number for number in tuple(in_flight) if number < self.sequence]:
                earlier = in_flight.get(sequence)
                if earlier is not None:
                    earlier.wait(deadline)


def send(
    pairs: Sequence[Pair],
    obj: object,
    channel: str,
    deadline: Deadline,
    *,
    forbid_grad: bool = False,
    leaving: Callable[[Encoded], None] | None = None,
) -> list[Outgoing]:
    """Encode ``obj`` once and post it to every pair. What cannot be sent is announced to the receivers in its place.

    ``leaving`` is called with what is about to leave.

    Raises:
        EncodeError, TrustError, LimitError: the object cannot be sent; the receivers were told; the pairs stay usable.
        PeerError, ProtocolError, TransferTimeout: a pair is closed.
    """
    for pair in pairs:
        if pair.closed is not None:
            pair.check_open()
    name = b"" if channel == "" else channel_name(channel)
    span = timeline.Span("encode") if timeline.active is not None or profiler._is_profiler_enabled else None
    try:
        content, encoded = prepare(obj, name, forbid_grad=forbid_grad)
        if leaving is not None:
            leaving(encoded)
    except BaseException as error:
        # Whatever it was, an interrupt too: the receivers must not wait for what will not come.
        for pair in pairs:
            notify(pair, Kind.ERROR, notice_of(error), channel, deadline)
        if isinstance(error, ObjcommError) and pairs:
            peer = pairs[0].peer if len(pairs) == 1 else None
            error.locate(rank=pairs[0].rank, peer=peer, channel=channel, phase="encode")
        raise
    if span is not None and pairs:
        span.end(pairs[0].rank, peers=[pair.peer for pair in pairs], channel=channel, bytes=content.nbytes)
    outgoing = [post(pair, content, encoded, channel, deadline) for pair in pairs]
    counters.objects_sent += len(outgoing)
    return outgoing


def prepare(obj: object, name: bytes, *, forbid_grad: bool = False) -> tuple[Content, Encoded]:
    """Encode an object for a message on the channel ``name``, of which nothing has left yet.

    Raises:
        EncodeError, TrustError, LimitError: it cannot be sent.
    """
    wanted = settings()
    encoded = encode(obj, trust=trust_here(), forbid_grad=forbid_grad)
    content = _content(Kind.DATA, encoded, name)
    if content.nbytes > wanted.max_bytes:
        raise LimitError(
            f"the message has {content.nbytes} bytes, max_bytes is {wanted.max_bytes}",
            hint="raise max_bytes on all ranks, or send the object in parts",
        )
    return content, encoded


def notify(pair: Pair, kind: Kind, notice: Notice, channel: str, deadline: Deadline) -> Outgoing:
    """Post an error or goodbye frame. Nobody need wait for it: it is small and owned by the pair until it was taken."""
    encoded = Encoded.of_skeleton(pack_notice(notice))
    return post(pair, _content(kind, encoded, channel_name(channel)), encoded, channel, deadline)


def _content(kind: Kind, encoded: Encoded, name: bytes) -> Content:
    segments = [(segment.numel(), not segment.is_cpu) for segment in encoded.segments] if encoded.segments else ()
    return Content(kind, Flag.OPAQUE if encoded.opaque else 0, name, encoded.skeleton, encoded.inline_bytes, segments)


def post(pair: Pair, content: Content, encoded: Encoded, channel: str, deadline: Deadline) -> Outgoing:
    """Post every transfer of a message."""
    terms = pair.terms()
    span = timeline.Span("post") if timeline.active is not None or profiler._is_profiler_enabled else None
    pair.hold_sending(deadline)
    try:
        sequence = pair.next_sent
        frame = _write(pair, content, encoded, content.head(sequence, terms))
        outgoing = pair.in_flight[sequence] = Outgoing(pair, channel, sequence, encoded, frame)
        try:
            _post_transfers(outgoing, frame, encoded)
        except ObjcommError as error:
            raise pair.close(error.locate(channel=channel, phase="send")) from error
        except BaseException:
            pair.close(PeerError("interrupted while a message was being posted", channel=channel, phase="send"))
            raise
        pair.next_sent = sequence + 1
        counters.bytes_sent += frame.nbytes
        for nbytes, _ in content.segments:
            counters.messages_sent += message_count(nbytes)
            counters.bytes_sent += nbytes
    finally:
        pair.sending.release()
    if span is not None:
        name = pair.message_name(sequence, sending=True)
        span.end(pair.rank, peer=pair.peer, channel=channel, bytes=content.nbytes, message=name)
    return outgoing


def _write(pair: Pair, content: Content, encoded: Encoded, head: bytes) -> Frame:
    link = pair.link
    frame = pair.borrow_frame(max(content.frame_bytes, link.window) if link.exact else content.frame_bytes)
    frame.view[: len(head)] = head
    if encoded.inline_bytes:
        encoded.write_inline_at(frame.address + content.inline_at)
    return frame


def _post_transfers(outgoing: Outgoing, frame: Frame, encoded: Encoded) -> None:
    link, pendings = outgoing.pair.link, outgoing.pendings
    if frame.nbytes <= link.window:
        pendings.append(("head", link.send_head(frame.memory)))
    else:
        pendings.append(("head", link.send_head(frame.memory[: link.window])))
        pendings.append(("head", link.send_head(frame.memory[link.window :])))
        counters.messages_sent += 1
    counters.messages_sent += 1
    if encoded.segments:
        pendings.append(("segments", link.send_segments(encoded.segments)))
