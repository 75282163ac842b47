"""The segments of a message on their way in: into their place, or out of the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import profiler

from . import timeline
from .counters import counters
from .deadline import Deadline
from .errors import LimitError, ObjcommError, PeerError, TransferTimeout
from .pair import Pair
from .transport import message_count
from .wire.frame import CHUNK_BYTES, Flag


class Refused(Exception):
    """This message is not wanted, but its transfers are still to come and must be taken."""

    def __init__(self, error: ObjcommError) -> None:
        super().__init__(str(error))
        self.error = error


def receive_segments(
    pair: Pair, into: list[torch.Tensor], segments: Sequence[tuple[int, bool]], channel: str, deadline: Deadline
) -> None:
    """Receive the segments of a message into ``into``; the next message may be on its way meanwhile."""
    span = timeline.Span("wire") if timeline.active is not None or profiler._is_profiler_enabled else None
    try:
        pending = pair.link.recv_segments(into, [accelerator for _, accelerator in segments])
        pair.post_ahead()
        pending.wait(deadline)
    except (TransferTimeout, PeerError) as error:
        raise pair.close(error.locate(channel=channel, phase="segments")) from error
    if span is not None:
        span.end(pair.rank, peer=pair.peer, channel=channel, bytes=sum(nbytes for nbytes, _ in segments))
    for nbytes, _ in segments:
        counters.messages_received += message_count(nbytes)
        counters.bytes_received += nbytes


def drain(pair: Pair, segments: Sequence[tuple[int, bool]], flags: int, channel: str, deadline: Deadline) -> None:
    """Take the segments of a refused message out of the way, one at a time, so that the next message arrives."""
    for nbytes, accelerator in segments:
        try:
            scratch = pair.link.allocate(nbytes, accelerator, None)
        except (RuntimeError, MemoryError) as error:
            raise pair.refuse(LimitError(f"no memory to receive a segment that is not wanted: {error}")) from None
        pieces = chunks([scratch], [(nbytes, accelerator)]) if flags & Flag.CHUNKED else [(scratch, accelerator)]
        try:
            for piece, _ in pieces:
                pair.link.recv_segments([piece], [accelerator]).wait(deadline)
        except (TransferTimeout, PeerError) as error:
            raise pair.close(error.locate(channel=channel, phase="segments")) from error
        for piece, _ in pieces:
            counters.messages_received += message_count(piece.numel())
        counters.bytes_received += nbytes
    pair.post_ahead()


def chunks(segments: Sequence[torch.Tensor], table: Sequence[tuple[int, bool]]) -> list[tuple[torch.Tensor, bool]]:
    """Segments as they are passed on from rank to rank, with where the first sender had them.

    Every rank cuts in the same places. Accelerator memory is not cut: its transfers are batches of their own.
    """
    cut: list[tuple[torch.Tensor, bool]] = []
    for segment, (_, accelerator) in zip(segments, table, strict=True):
        step = segment.numel() if accelerator else CHUNK_BYTES
        cut.extend((segment[at : at + step], accelerator) for at in range(0, segment.numel(), step))
    return cut
