"""One message on its way out: all is encoded before the first byte leaves, then every transfer is posted at once."""

from __future__ import annotations

import torch

from .codec import Encoded, encode
from .config import settings
from .deadline import Deadline
from .errors import LimitError, ObjcommError, PeerError
from .hostmemory import tensor_of, view_of
from .pair import Pair
from .trace import counters
from .transport import Pending, message_count
from .wire.frame import Flag, Kind, Terms, channel_name, frame_layout, write_frame
from .wire.notice import Notice, notice_of, pack_notice

# Above this a frame lives in the allocator's memory, where large blocks are cheap to come by and need no clearing.
_SMALL_FRAME = 1 << 16


class Outgoing:
    """A message whose transfers are posted. It owns the frame and keeps alive what the segments point into."""

    __slots__ = ("_kept", "_pendings", "channel", "pair", "sequence")

    def __init__(self, pair: Pair, channel: str, sequence: int, kept: object) -> None:
        self.pair = pair
        self.channel = channel
        self.sequence = sequence
        self._kept: object = kept
        self._pendings: list[tuple[str, Pending]] = []

    def add(self, phase: str, pending: Pending) -> None:
        self._pendings.append((phase, pending))

    def wait(self, deadline: Deadline) -> None:
        """Block until the caller's memory is no longer needed.

        Raises:
            TransferTimeout, PeerError, ProtocolError: located, after closing the pair.
        """
        pair = self.pair
        if self._kept is None:
            return
        for place, (phase, pending) in enumerate(self._pendings):
            try:
                pending.wait(deadline)
            except ObjcommError as error:
                raise pair.close(error.locate(channel=self.channel, phase=phase)) from error
            if place == 0:
                pair.check_agreement()
        self._kept = None
        self._pendings = []
        in_flight = pair.in_flight
        in_flight.pop(self.sequence, None)
        if in_flight:
            # Messages complete in order, so those before this one are over as well: let go of their memory.
            for sequence in [number for number in tuple(in_flight) if number < self.sequence]:
                earlier = in_flight.get(sequence)
                if earlier is not None:
                    earlier.wait(deadline)


def send(pair: Pair, obj: object, channel: str, deadline: Deadline) -> Outgoing:
    """Encode ``obj`` and post it. What cannot be sent is announced to the receiver in its place.

    Raises:
        EncodeError, TrustError, LimitError: the object cannot be sent; the receiver was told; the pair stays usable.
        PeerError, ProtocolError, TransferTimeout: the pair is closed.
    """
    pair.check_open()
    name = channel_name(channel)
    terms = pair.terms()
    try:
        encoded = encode(obj, trust=settings().trust)
        _check_size(encoded, name, terms)
    except BaseException as error:
        # Whatever it was, an interrupt too: the receiver must not wait for what will not come.
        notify(pair, Kind.ERROR, notice_of(error), name, channel, deadline)
        if isinstance(error, ObjcommError):
            error.locate(rank=pair.rank, peer=pair.peer, channel=channel, phase="encode")
        raise
    with pair.sending(deadline):
        outgoing = _post(pair, Kind.DATA, encoded, name, channel, terms)
        counters.objects_sent += 1
    return outgoing


def notify(pair: Pair, kind: Kind, notice: Notice, name: bytes, channel: str, deadline: Deadline) -> Outgoing:
    """Post an error or goodbye frame. Nobody waits for it: it is small and owned by the pair until it was taken."""
    encoded = Encoded.of_skeleton(pack_notice(notice))
    with pair.sending(deadline):
        return _post(pair, kind, encoded, name, channel, pair.terms())


def _check_size(encoded: Encoded, name: bytes, terms: Terms) -> None:
    segments = sum(segment.numel() for segment in encoded.segments)
    _, frame = frame_layout(len(encoded.skeleton), encoded.inline_bytes, len(encoded.segments), len(name))
    if frame + segments > terms.max_bytes:
        raise LimitError(
            f"the message has {frame + segments} bytes, max_bytes is {terms.max_bytes}",
            hint="raise max_bytes on all ranks, or send the object in parts",
        )


def _post(pair: Pair, kind: Kind, encoded: Encoded, name: bytes, channel: str, terms: Terms) -> Outgoing:
    link = pair.link
    segments = [(segment.numel(), segment.device.type != "cpu") for segment in encoded.segments]
    inline_at, frame_bytes = frame_layout(len(encoded.skeleton), encoded.inline_bytes, len(segments), len(name))
    frame, view = _frame_buffer(max(frame_bytes, link.window) if link.exact else frame_bytes)
    write_frame(
        view,
        kind=kind,
        flags=Flag.OPAQUE if encoded.opaque else 0,
        sequence=pair.next_sent,
        channel=name,
        skeleton=encoded.skeleton,
        inline_bytes=encoded.inline_bytes,
        segments=segments,
        terms=terms,
    )
    if encoded.inline_bytes:
        encoded.write_inline(frame[inline_at:frame_bytes])
    outgoing = Outgoing(pair, channel, pair.next_sent, (encoded, frame))
    pair.in_flight[outgoing.sequence] = outgoing
    try:
        outgoing.add("head", link.send_head(frame[: link.window] if frame.numel() > link.window else frame))
        counters.messages_sent += 1
        if frame.numel() > link.window:
            outgoing.add("head", link.send_head(frame[link.window :]))
            counters.messages_sent += 1
        if segments:
            outgoing.add("segments", link.send_segments(encoded.segments))
    except ObjcommError as error:
        raise pair.close(error.locate(channel=channel, phase="send")) from error
    except BaseException:
        pair.close(PeerError("interrupted while a message was being posted", channel=channel, phase="send"))
        raise
    pair.next_sent += 1
    for nbytes, _ in segments:
        counters.messages_sent += message_count(nbytes)
        counters.bytes_sent += nbytes
    counters.bytes_sent += frame.numel()
    return outgoing


def _frame_buffer(nbytes: int) -> tuple[torch.Tensor, memoryview]:
    if nbytes <= _SMALL_FRAME:
        buffer = bytearray(nbytes)
        return tensor_of(buffer), memoryview(buffer)
    frame = torch.empty(nbytes, dtype=torch.uint8)
    return frame, view_of(frame)
