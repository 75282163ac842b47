"""Calls among several ranks that go up a tree to one rank and down again.

On the way up every rank says that it is there, and brings its object if it has one to bring; on the way down comes what
the rank at the root has, or why there is nothing. So nobody gets anything unless all are there and nothing failed, and
whatever fails on the way up is known to all: at the root no later than the last of the messages up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from .arrival import Arrival
from .codec import Encoded
from .config import settings
from .counters import counters
from .deadline import Deadline
from .errors import ObjcommError, PeerError, ProtocolError
from .failures import Failures
from .outgoing import Outgoing, notify, prepare
from .pair import Pair
from .relay import Joined, Piece, send_bundle, spread
from .rollcall import Call
from .segments import chunks
from .star import Taken
from .team import Team
from .wire.bundle import Parcel
from .wire.frame import Content, Flag, Kind, channel_name

# A message of a small object costs far more than its bytes: few ranks are all told by the root itself.
FANOUT = 4
# What is larger than this costs more to bring to the root and to give back than a message to everybody does.
_LARGE_BYTES = 256 << 10
# How long a rank that gives up waits for others to hear why.
_LAST_WORD_SECONDS = 1.0


class Sweep:
    """One call in progress on this rank.

    Attributes:
        parent: the pair towards the root; ``None`` on the root.
        children: the pairs away from it.
    """

    def __init__(self, call: Call, root: int, channel: str, deadline: Deadline, device: torch.device | None) -> None:
        self.team = team = call.team
        self.channel = channel
        self.name = channel_name(channel)
        self.deadline = deadline
        self.root = root
        self.parent, self.children = _place(team, root)
        self.failures = Failures(team.rank, channel, call, deadline)
        self._outgoings: list[Outgoing] = []
        # Posted first of all: what is sent to a rank that waits for it already needs no answer.
        self._from_parent = None
        if self.parent is not None:
            self._from_parent = Arrival(self.parent, channel, self.name, device, self.children)
            self._from_parent.post()
        self._from_children = [Arrival(child, channel, self.name, device) for child in self.children]
        for arrival in self._from_children:
            arrival.post()
        # All that is the same for the objects of all ranks; see Arrival.open.
        self.opener = self._from_parent or self._from_children[0]

    def encode(self, obj: object, *, forbid_grad: bool = False) -> tuple[Content, Encoded] | None:
        """This rank's object, or ``None``: then all will be told why."""
        try:
            return prepare(obj, self.name, forbid_grad=forbid_grad)
        except BaseException as error:
            self.failures.own(error)
            return None

    def up(self, own: Sequence[Piece] = ()) -> list[Piece]:
        """Bring what the children send, and ``own``, to the parent. On the root: return it."""
        pieces = list(own)
        for arrival in self._from_children:
            try:
                arrived: Any = arrival.wait(self.deadline)
            except ObjcommError as error:
                self.failures.note(error, arrival.pair)
                continue
            self.failures.present(arrival.pair)
            for piece in arrived:
                if piece.parcel.notice is None:
                    pieces.append(piece)
                self.failures.hear(piece.parcel.notice)
        if self.parent is not None:
            try:
                told = self.failures.told() or pieces
                self._outgoings.append(send_bundle(self.parent, told, self.name, self.channel, self.deadline))
            except ObjcommError as error:
                self.failures.note(error, self.parent)
        return pieces

    def down(self, pieces: Sequence[Piece], segments: Sequence[torch.Tensor]) -> Sequence[Piece]:
        """On the root: send to all what it has, unless something failed. Returns what it sends."""
        told = self.failures.told()
        if told:
            pieces, segments = told, ()
        table = [(segment.numel(), not segment.is_cpu) for segment in segments]
        joined = Joined(pieces)
        content = joined.content(self.name, table)
        self.send(self.children, content, joined, [chunk for chunk, _ in chunks(segments, table)])
        return pieces

    def send(self, pairs: Sequence[Pair], content: Content, encoded: Encoded, segments: Sequence[torch.Tensor]) -> None:
        """Send one message straight to several ranks."""
        note = self.failures.note
        self._outgoings += spread(pairs, content, encoded, segments, self.channel, self.deadline, note)

    def arrive(self) -> list[Piece] | None:
        """Elsewhere: take what the root has sent; it has been passed on by then. ``None`` if others may have it."""
        arrival = self._from_parent
        assert arrival is not None
        try:
            arrived: Any = arrival.wait(self.deadline)
        except ObjcommError as error:
            self.failures.note(error, arrival.pair)
            self._pass_on_failures()
            # What the parent sent in another call says that it has not been in this one: then nothing came to anybody.
            return [] if isinstance(error, ProtocolError) and arrival.pair.closed is None else None
        self.failures.present(arrival.pair)
        self._outgoings.extend(arrival.passed)
        for child, failure in arrival.failed.items():
            self.failures.note(failure, self.team.pairs[child])
        for piece in arrived:
            self.failures.hear(piece.parcel.notice)
        return arrived  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Wait until nothing of this rank is needed any more, and raise what failed."""
        self.failures.wait_for(self._outgoings, self.deadline)
        self.failures.check()

    def leave(self) -> None:
        """Nothing came down to this rank, but it may have come to others, which then count on what this one sends.

        It does not know, so they must not wait: they are told why, and no longer connected.
        """
        others = [pair for _, pair in self.team.from_here() if pair is not self.parent and pair not in self.children]
        told = self.failures.told()[0].parcel.notice
        assert told is not None
        outgoings = list(self._outgoings)
        for pair in others:
            with contextlib.suppress(ObjcommError):
                outgoings.append(notify(pair, Kind.ERROR, told, self.channel, self.deadline))
        last = Deadline(min(_LAST_WORD_SECONDS, self.deadline.remaining()))
        # Not through the messages themselves: nobody need hear that some of them were not taken.
        for pending in [pending for outgoing in outgoings for _, pending in outgoing.pendings]:
            with contextlib.suppress(ObjcommError):
                pending.wait(last)
        for pair in others:
            pair.close(PeerError(f"this rank left a call in which rank {pair.peer} may be: {told.text}", phase="head"))
            pair.link.close()

    def _pass_on_failures(self) -> None:
        """In a frame of its own, not a bundle: who gets it knows that it is not what the root told all."""
        told = self.failures.told()[0].parcel.notice
        assert told is not None
        for child in self.children:
            try:
                self._outgoings.append(notify(child, Kind.ERROR, told, self.channel, self.deadline))
            except ObjcommError as error:
                self.failures.note(error, child)


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
            encoded = message[1]
            sweep.down([_piece(sweep.team.rank, encoded)], encoded.segments)
            counters.objects_sent += len(sweep.team.pairs)
        sweep.finish()
        return obj
    sweep.up()
    pieces = _complete(sweep, sweep.arrive() or (), [sweep.root])
    objects = _open(sweep, pieces)
    sweep.finish()
    return objects[sweep.root]


def all_gather(sweep: Sweep, obj: object, device: torch.device | None) -> dict[int, Any]:
    """Everybody's object by rank, but for this rank's own.

    Large objects do not go through the root: each goes from its rank to all the others once these know of it.
    """
    rank, limit = sweep.team.rank, min(_LARGE_BYTES, settings().max_bytes // (2 * len(sweep.team.ranks)))
    message = sweep.encode(obj)
    own = []
    if message is not None:
        content, encoded = message
        own = [Piece(Parcel(rank, apart=True), None) if content.nbytes > limit else _piece(rank, encoded)]
        counters.objects_sent += len(sweep.team.pairs)
    gathered = sweep.up(own)
    pieces = sweep.down(gathered, ()) if sweep.parent is None else sweep.arrive()
    if pieces is None:
        sweep.leave()
        pieces = ()
    pieces = _complete(sweep, pieces, sweep.team.ranks)
    apart = [piece.parcel.origin for piece in pieces if piece.parcel.apart]
    expected = [Taken(pair, sweep.channel, device) for peer, pair in sweep.team.from_here() if peer in apart]
    for taken in expected:
        taken.post()
    if message is not None and rank in apart:
        sweep.send([pair for _, pair in sweep.team.from_here()], *message, message[1].segments)
    objects = _open(sweep, [piece for piece in pieces if piece.parcel.origin != rank and not piece.parcel.apart])
    for taken in expected:
        try:
            taken.wait(sweep.deadline)
            objects[taken.pair.peer] = taken.open()
        except ObjcommError as error:
            sweep.failures.note(error, taken.pair)
    sweep.finish()
    return objects


def _complete(sweep: Sweep, pieces: Sequence[Piece], ranks: Sequence[int]) -> Sequence[Piece]:
    """The pieces, if nothing failed and there is one of each rank; nothing else is built."""
    origins = [piece.parcel.origin for piece in pieces if piece.parcel.notice is None]
    if not sweep.failures and sorted(origins) != sorted(ranks):
        text = f"objects of the ranks {origins} arrived where one of each of {list(ranks)} was due"
        sweep.failures.keep(ProtocolError(text, phase="head"))
        return ()
    return pieces


def _open(sweep: Sweep, pieces: Sequence[Piece]) -> dict[int, Any]:
    """Build the objects that came, while they are still being passed on."""
    objects: dict[int, Any] = {}
    for piece in pieces:
        if piece.parcel.notice is None:
            try:
                objects[piece.parcel.origin] = sweep.opener.open(piece)
            except ObjcommError as error:
                sweep.failures.keep(error)
    return objects


def _piece(rank: int, encoded: Encoded) -> Piece:
    flags = Flag.OPAQUE if encoded.opaque else 0
    return Piece(Parcel(rank, None, False, flags, encoded.skeleton, encoded.inline_bytes), encoded)
