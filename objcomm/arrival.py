"""A bundle on its way in. Ranks further down the tree get it before anything in it is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .codec import Plan
from .counters import counters
from .deadline import Deadline
from .errors import ObjcommError, PeerError, ProtocolError, UsageError
from .hostmemory import Frame
from .incoming import Incoming
from .outgoing import Outgoing
from .pair import Pair
from .relay import NOTHING, Piece, Relay, finish
from .segments import Refused, chunks
from .transport import kind_here, message_count
from .wire.bundle import read_bundle
from .wire.frame import HEADER_BYTES, Body, Header


class Arrival(Incoming):
    """A receive of a bundle, whose value is the list of its pieces; objects are built by :meth:`open`.

    Attributes:
        passed: the messages to ``children`` that carry it on.
        failed: children that could not be reached.
    """

    __slots__ = ("_built_from", "_children", "_nothing", "failed", "passed")

    def __init__(
        self,
        pair: Pair,
        channel: str,
        name: bytes,
        device: torch.device | None = None,
        children: Sequence[Pair] = (),
    ) -> None:
        super().__init__(pair, channel, device, None, has_handle=True)
        self._nothing = name + NOTHING.skeleton
        self._children = children
        self._built_from: tuple[Plan, list[torch.Tensor]] | Refused | None = None
        self.passed: list[Outgoing] = []
        self.failed: dict[int, ObjcommError] = {}

    def open(self, piece: Piece) -> object:
        """Build one of the objects that came.

        Raises:
            DecodeError, TrustError, LimitError: it cannot be built here.
        """
        assert isinstance(piece.inline, torch.Tensor)
        origin, parcel = piece.parcel.origin, piece.parcel
        try:
            if self._built_from is None:
                self._built_from = self._admit(parcel.flags, parcel.skeleton, parcel.inline_bytes, ())
            if isinstance(self._built_from, Refused):
                raise self._built_from
            plan, segments = self._built_from
            self._built_from = None
            return self._build(plan, piece.inline, segments)
        except Refused as refused:
            error = refused.error
            raise error.locate(rank=self.pair.rank, peer=origin, channel=self.channel) from error.__cause__
        except ObjcommError as error:
            raise error.locate(rank=self.pair.rank, peer=origin, channel=self.channel) from error.__cause__

    def _take(self, deadline: Deadline) -> bool:
        header = self._take_header(deadline)
        end, nothing, pair = header.frame_bytes, self._nothing, self.pair
        # Most bundles on the way up are empty.
        if end == HEADER_BYTES + len(nothing) and pair.window_view[HEADER_BYTES:end] == nothing:
            counters.bytes_received += pair.link.window if pair.link.exact else end
            pair.post_ahead()
            self._value = ()
            return True
        return self._take_message(header, deadline)

    def _take_frame(self, header: Header, deadline: Deadline) -> tuple[memoryview, torch.Tensor]:
        if not self._children:
            return super()._take_frame(header, deadline)
        pair, nbytes, window = self.pair, header.frame_bytes, self.pair.link.window
        counters.bytes_received += max(nbytes, window) if pair.link.exact else nbytes
        if nbytes <= window:
            frame = Frame.of(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            frame.view[:] = pair.window_view[:nbytes]
        else:
            frame = Frame.of(self._transfer_rest(header, deadline))
            counters.messages_received += 1
        self._inline = frame
        return frame.view[: header.inline_at], frame.memory[header.inline_at :]

    def _take_object(self, header: Header, body: Body, inline: torch.Tensor, deadline: Deadline) -> object:
        self._check_channel(body)
        try:
            parcels = read_bundle(body.skeleton, header.inline_bytes)
        except ProtocolError as error:
            raise Refused(error) from error
        if body.segments and not (len(parcels) == 1 and parcels[0].skeleton):
            raise Refused(ProtocolError("a damaged bundle arrived: segments without an object that they belong to"))
        frame = self._inline
        if len(parcels) == 1:
            pieces = [Piece(parcels[0], inline)]
        else:
            pieces = [
                Piece(parcel, inline[parcel.inline_at : parcel.inline_at + parcel.inline_bytes]) for parcel in parcels
            ]
        if self._children or len(parcels) != 1:
            # It is read by others too, so it does not go back to the pair when the first object has been built.
            self._inline = None
        if self._children and kind_here() is None and any(accelerator for _, accelerator in body.segments):
            raise Refused(
                UsageError(
                    f"rank {self.pair.rank} has no accelerator, and cannot pass on what is on one",
                    hint="send with device='cpu', or leave that rank out",
                )
            )
        relays = [] if not self._children or frame is None else self._pass_on(frame.memory, deadline)
        if body.segments:
            parcel = pieces[0].parcel
            try:
                self._built_from = self._admit(parcel.flags, parcel.skeleton, parcel.inline_bytes, body.segments)
                into: list[torch.Tensor] = self._built_from[1]
            except Refused as refused:
                self._built_from = refused
                into = self._scratch(body.segments, relays)
            self._stream(into, body.segments, relays, deadline)
        self.passed = finish(relays, self._fail)
        self.pair.post_ahead()
        return pieces

    def _allocate(self, nbytes: int, accelerator: bool) -> torch.Tensor:
        # What is passed on must lie where the first sender had it: the next rank counts on that.
        device = None if accelerator and self._children else self._device
        return self._clear(self.pair.link.allocate(nbytes, accelerator, device))

    def _pass_on(self, frame: torch.Tensor, deadline: Deadline) -> list[Relay]:
        relays = []
        for child in self._children:
            try:
                relays.append(Relay(child, frame, self.channel, deadline))
            except ObjcommError as error:
                self._fail(error, child)
        return relays

    def _fail(self, error: ObjcommError, child: Pair) -> None:
        self.failed[child.peer] = error

    def _scratch(self, table: Sequence[tuple[int, bool]], relays: Sequence[Relay]) -> list[torch.Tensor]:
        """Memory for segments that are not wanted here, but must be taken and passed on."""
        try:
            return [self._allocate(nbytes, accelerator) for nbytes, accelerator in table]
        except (RuntimeError, MemoryError) as error:
            failure = PeerError(f"no memory to receive a segment that is not wanted: {error}")
            for one in relays:
                one.abandon(failure)
            raise self.pair.refuse(failure) from None

    def _stream(
        self,
        into: Sequence[torch.Tensor],
        table: Sequence[tuple[int, bool]],
        relays: Sequence[Relay],
        deadline: Deadline,
    ) -> None:
        """Receive segments, and pass each chunk on as soon as it is here."""
        link = self.pair.link
        try:
            pieces = chunks(into, table)
            pendings = [link.recv_segments([piece], [accelerator]) for piece, accelerator in pieces]
            for pending, (piece, _) in zip(pendings, pieces, strict=True):
                pending.wait(deadline)
                counters.messages_received += message_count(piece.numel())
                counters.bytes_received += piece.numel()
                for one in relays:
                    one.add(piece)
        except BaseException as error:
            located = (
                self.pair.close(error.locate(channel=self.channel, phase="segments"))
                if isinstance(error, ObjcommError)
                else PeerError("interrupted while a segment was being passed on")
            )
            for one in relays:
                one.abandon(located)
            raise
