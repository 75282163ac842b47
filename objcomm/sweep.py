"""Calls among several ranks that go up a tree to one rank and down again.

On the way up every rank says that it is there, and brings its object if it has one to bring; on the way down comes what
the rank at the root has, or why there is nothing. So nobody gets anything unless all are there and nothing failed, and
whatever fails on the way up is known to all: at the root no later than the last of the messages up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arrival import Arrival
from .codec import Encoded
from .deadline import Deadline
from .errors import ObjcommError
from .incoming import chunks
from .outgoing import Message, Outgoing, message_of
from .pair import Pair
from .relay import Piece, Relay, bundle, relay
from .team import Team
from .trace import counters
from .wire.bundle import Parcel
from .wire.frame import Flag, channel_name
from .wire.notice import Notice, error_of, notice_of

# A message of a small object costs far more than its bytes: few ranks are all told by the root itself.
FANOUT = 4
# One reason is enough; a few more may help.
_MOST_TOLD = 4


class Sweep:
    """One call in progress on this rank.

    Attributes:
        parent: the pair towards the root; ``None`` on the root.
        children: the pairs away from it.
    """

    def __init__(
        self, team: Team, root: int, channel: str, deadline: Deadline, device: torch.device | None, label: str
    ) -> None:
        self.team = team
        self.channel = f"<{label}> {channel}"
        self.name = channel_name(self.channel)
        self.deadline = deadline
        self.parent, self.children = _place(team, root)
        for pair in self.children if self.parent is None else [self.parent, *self.children]:
            pair.check_open()
        # What to tell the others, and what to raise here.
        self._failures: list[tuple[Notice, BaseException]] = []
        self._outgoings: list[Outgoing] = []
        # Posted first of all: what is sent to a rank that waits for it already needs no answer.
        self._from_parent = None
        if self.parent is not None:
            self._from_parent = Arrival(self.parent, self.channel, device, self.children)
            self.parent.expect(self._from_parent)
        self._from_children = [Arrival(child, self.channel, device) for child in self.children]
        for arrival in self._from_children:
            arrival.pair.expect(arrival)

    def encode(self, obj: object, *, forbid_grad: bool = False) -> Message | None:
        """This rank's object, or ``None``: then all will be told why."""
        try:
            return message_of(obj, self.name, forbid_grad=forbid_grad)
        except BaseException as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Something failed on this rank before anything left: all will be told."""
        if isinstance(error, ObjcommError):
            error.locate(rank=self.team.rank, channel=self.channel, phase="encode")
        self._failures.insert(0, (notice_of(error, self.team.rank), error))

    def up(self, own: Sequence[Piece] = ()) -> list[Piece]:
        """Bring what the children send, and ``own``, to the parent. On the root: return it."""
        pieces = list(own)
        for arrival in self._from_children:
            try:
                arrived: Any = arrival.wait(self.deadline)
            except ObjcommError as error:
                self._note(error, arrival.pair)
                continue
            for piece in arrived:
                if piece.parcel.notice is not None:
                    self._hear(piece.parcel.notice)
                else:
                    pieces.append(piece)
        if self.parent is not None:
            try:
                frame = bundle(self._told() or pieces, self.name, self.parent.terms(), ())
                self._outgoings.append(relay(self.parent, frame, self.channel, self.deadline))
            except ObjcommError as error:
                self._note(error, self.parent)
        return pieces

    def down(self, pieces: Sequence[Piece], segments: Sequence[torch.Tensor]) -> None:
        """On the root: send to all what it has, unless something failed."""
        told = self._told()
        if told:
            pieces, segments = told, ()
        if not self.children:
            return
        table = [(segment.numel(), not segment.is_cpu) for segment in segments]
        frame = bundle(pieces, self.name, self.children[0].terms(), table)
        relays = []
        for child in self.children:
            try:
                relays.append(Relay(child, frame, self.channel, self.deadline))
            except ObjcommError as error:
                self._note(error, child)
        for piece, _ in chunks(segments, table):
            for one in relays:
                one.add(piece)
        for one in relays:
            try:
                self._outgoings.append(one.finish())
            except ObjcommError as error:
                self._note(error, one.pair)

    def arrive(self) -> tuple[Arrival, list[Piece]]:
        """Elsewhere: take what the root has sent; it has been passed on by then."""
        arrival = self._from_parent
        assert arrival is not None
        try:
            arrived: Any = arrival.wait(self.deadline)
        except ObjcommError as error:
            self._note(error, arrival.pair)
            self._pass_on_failures()
            return arrival, []
        self._outgoings.extend(arrival.passed)
        for child, failure in arrival.failed.items():
            self._note(failure, self.team.pairs[child])
        for piece in arrived:
            if piece.parcel.notice is not None:
                self._hear(piece.parcel.notice)
        return arrival, arrived

    def finish(self) -> None:
        """Wait until nothing of this rank is needed any more, and raise what failed."""
        for outgoing in self._outgoings:
            try:
                outgoing.wait(self.deadline)
            except ObjcommError as error:
                self._note(error, outgoing.pair)
        if self._failures:
            raise self._failures[0][1]

    def _note(self, error: ObjcommError, pair: Pair) -> None:
        error.locate(rank=self.team.rank, peer=pair.peer, channel=self.channel)
        self._failures.append((notice_of(error, error.peer), error))

    def _hear(self, notice: Notice) -> None:
        if notice.rank != self.team.rank:
            heard = error_of(notice, self.team.rank).locate(rank=self.team.rank, channel=self.channel)
            self._failures.append((notice, heard))

    def _told(self) -> list[Piece]:
        return [Piece(Parcel(notice.rank or 0, notice), None) for notice, _ in self._failures[:_MOST_TOLD]]

    def _pass_on_failures(self) -> None:
        for child in self.children:
            try:
                frame = bundle(self._told(), self.name, child.terms(), ())
                self._outgoings.append(relay(child, frame, self.channel, self.deadline))
            except ObjcommError as error:
                self._note(error, child)


def _place(team: Team, root: int) -> tuple[Pair | None, list[Pair]]:
    """This rank's neighbours in the tree that hangs from ``root``: the same tree, whatever order ``ranks`` has."""
    order = sorted(team.ranks)
    count, first = len(order), order.index(root)
    place = (order.index(team.rank) - first) % count

    def pair_at(place: int) -> Pair:
        return team.pairs[order[(place + first) % count]]

    children = range(FANOUT * place + 1, min(FANOUT * (place + 1) + 1, count))
    return (None if place == 0 else pair_at((place - 1) // FANOUT)), [pair_at(child) for child in children]


def broadcast(sweep: Sweep, obj: Any, forbid_grad: bool) -> Any:
    """Give the root's object to all; on the root ``obj`` is the object, elsewhere it is ignored."""
    if sweep.parent is None:
        message = sweep.encode(obj, forbid_grad=forbid_grad)
        sweep.up()
        if message is None:
            sweep.down((), ())
        else:
            sweep.down([piece_of(sweep.team.rank, message)], message.encoded.segments)
            counters.objects_sent += len(sweep.team.pairs)
        sweep.finish()
        return obj
    sweep.up()
    arrival, pieces = sweep.arrive()
    return _open(sweep, arrival, pieces)[0]


def _open(sweep: Sweep, arrival: Arrival, pieces: Sequence[Piece]) -> list[Any]:
    """Build the objects that came, while they are still being passed on."""
    objects = []
    failure: ObjcommError | None = None
    for piece in pieces:
        if piece.parcel.notice is None:
            try:
                objects.append(arrival.open(piece))
            except ObjcommError as error:
                failure = failure or error
    sweep.finish()
    if failure is not None:
        raise failure
    return objects


def piece_of(rank: int, message: Message) -> Piece:
    encoded: Encoded = message.encoded
    flags = Flag.OPAQUE if encoded.opaque else 0
    return Piece(Parcel(rank, None, False, flags, encoded.skeleton, encoded.inline_bytes), encoded)
