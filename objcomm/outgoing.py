"""One message on its way out: all is encoded before the first byte leaves, then every transfer is posted at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from .codec import Encoded, encode
from .config import settings, trust_here
from .deadline import Deadline
from .errors import LimitError, ObjcommError, PeerError
from .pair import Frame, Pair
from .trace import counters
from .transport import Pending, message_count
from .wire.frame import Flag, Kind, Terms, channel_name, frame_layout, head_bytes
from .wire.notice import Notice, notice_of, pack_notice


class Outgoing:
    """A message whose transfers are posted. It owns the frame and keeps alive what the segments point into."""

    __slots__ = ("_encoded", "_frame", "_pendings", "_waiting", "channel", "pair", "sequence")

    def __init__(self, pair: Pair, channel: str, sequence: int, encoded: object, frame: Frame) -> None:
        self.pair = pair
        self.channel = channel
        self.sequence = sequence
        self._encoded: object | None = encoded
        self._frame = frame
        self._waiting = threading.Lock()
        self._pendings: list[tuple[str, Pending]] = []

    def add(self, phase: str, pending: Pending) -> None:
        self._pendings.append((phase, pending))

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
        for place, (phase, pending) in enumerate(self._pendings):
            try:
                pending.wait(deadline)
            except ObjcommError as error:
                raise pair.close(error.locate(channel=self.channel, phase=phase)) from error
            if place == 0:
                pair.check_agreement()
        self._encoded = None
        self._pendings = []
        in_flight = pair.in_flight
        del in_flight[self.sequence]
        pair.return_frame(self._frame)
        if in_flight:
            # Messages complete in order, so those before this one are over as well: let go of their memory.
            for sequence in [number for number in tuple(in_flight) if number < self.sequence]:
                earlier = in_flight.get(sequence)
                if earlier is not None:
                    earlier.wait(deadline)


def send(
    pairs: Sequence[Pair], obj: object, channel: str, deadline: Deadline, *, forbid_grad: bool = False
) -> list[Outgoing]:
    """Encode ``obj`` once and post it to every pair. What cannot be sent is announced to the receivers in its place.

    Raises:
        EncodeError, TrustError, LimitError: the object cannot be sent; the receivers were told; the pairs stay usable.
        PeerError, ProtocolError, TransferTimeout: a pair is closed.
    """
    for pair in pairs:
        pair.check_open()
    name = channel_name(channel)
    try:
        message = message_of(obj, name, forbid_grad=forbid_grad)
    except BaseException as error:
        # Whatever it was, an interrupt too: the receivers must not wait for what will not come.
        for pair in pairs:
            notify(pair, Kind.ERROR, notice_of(error), channel, deadline)
        if isinstance(error, ObjcommError) and pairs:
            peer = pairs[0].peer if len(pairs) == 1 else None
            error.locate(rank=pairs[0].rank, peer=peer, channel=channel, phase="encode")
        raise
    outgoing = [post(pair, message, channel, deadline) for pair in pairs]
    counters.objects_sent += len(outgoing)
    return outgoing


def message_of(obj: object, name: bytes, *, forbid_grad: bool = False) -> Message:
    """Encode an object, of which nothing has left yet.

    Raises:
        EncodeError, TrustError, LimitError: it cannot be sent.
    """
    limit = settings().max_bytes
    message = Message(Kind.DATA, encode(obj, trust=trust_here(), forbid_grad=forbid_grad), name)
    if message.nbytes > limit:
        raise LimitError(
            f"the message has {message.nbytes} bytes, max_bytes is {limit}",
            hint="raise max_bytes on all ranks, or send the object in parts",
        )
    return message


def notify(pair: Pair, kind: Kind, notice: Notice, channel: str, deadline: Deadline) -> None:
    """Post an error or goodbye frame. Nobody waits for it: it is small and owned by the pair until it was taken."""
    message = Message(kind, Encoded.of_skeleton(pack_notice(notice)), channel_name(channel))
    post(pair, message, channel, deadline)


class Message:
    """What an encoded object becomes on the wire."""

    __slots__ = ("encoded", "frame_bytes", "inline_at", "kind", "name", "nbytes", "segments")

    def __init__(self, kind: Kind, encoded: Encoded, name: bytes) -> None:
        self.kind = kind
        self.encoded = encoded
        self.name = name
        self.segments = [(segment.numel(), not segment.is_cpu) for segment in encoded.segments]
        self.inline_at, self.frame_bytes = frame_layout(
            len(encoded.skeleton), encoded.inline_bytes, len(self.segments), len(name)
        )
        self.nbytes = self.frame_bytes + sum([nbytes for nbytes, _ in self.segments])


def post(pair: Pair, message: Message, channel: str, deadline: Deadline) -> Outgoing:
    terms = pair.terms()
    pair.hold_sending(deadline)
    try:
        frame = _write(pair, message, terms)
        outgoing = Outgoing(pair, channel, pair.next_sent, message.encoded, frame)
        pair.in_flight[outgoing.sequence] = outgoing
        try:
            _post_transfers(outgoing, frame, message.encoded.segments)
        except ObjcommError as error:
            raise pair.close(error.locate(channel=channel, phase="send")) from error
        except BaseException:
            pair.close(PeerError("interrupted while a message was being posted", channel=channel, phase="send"))
            raise
        pair.next_sent += 1
        counters.bytes_sent += frame.nbytes
        for nbytes, _ in message.segments:
            counters.messages_sent += message_count(nbytes)
            counters.bytes_sent += nbytes
    finally:
        pair.sending.release()
    return outgoing


def _write(pair: Pair, message: Message, terms: Terms) -> Frame:
    link, encoded = pair.link, message.encoded
    head = head_bytes(
        kind=message.kind,
        flags=Flag.OPAQUE if encoded.opaque else 0,
        sequence=pair.next_sent,
        channel=message.name,
        skeleton=encoded.skeleton,
        inline_bytes=encoded.inline_bytes,
        segments=message.segments,
        terms=terms,
    )
    frame = pair.borrow_frame(max(message.frame_bytes, link.window) if link.exact else message.frame_bytes)
    frame.view[: len(head)] = head
    if encoded.inline_bytes:
        encoded.write_inline_at(frame.memory.data_ptr() + message.inline_at)
    return frame


def _post_transfers(outgoing: Outgoing, frame: Frame, segments: list[torch.Tensor]) -> None:
    link = outgoing.pair.link
    if frame.nbytes <= link.window:
        outgoing.add("head", link.send_head(frame.memory))
    else:
        outgoing.add("head", link.send_head(frame.memory[: link.window]))
        outgoing.add("head", link.send_head(frame.memory[link.window :]))
        counters.messages_sent += 1
    counters.messages_sent += 1
    if segments:
        outgoing.add("segments", link.send_segments(segments))
