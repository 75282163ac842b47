"""Calls in which one rank exchanges an object of its own with each of the others, and with them only.

All of them wait for one message of that rank, so that nobody returns unless all were there and nothing failed: in a
scatter it is their object, which leaves after everybody said that it is there; in a gather it is the verdict, which
leaves after everybody's object came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .arrival import Arrival
from .codec import Encoded, Plan
from .counters import counters
from .deadline import Deadline
from .errors import ObjcommError
from .failures import Failures
from .incoming import Incoming
from .outgoing import Outgoing, notify, post, prepare
from .pair import Pair
from .relay import send_bundle
from .rollcall import Call
from .wire.frame import Content, Kind, channel_name
from .wire.notice import notice_of


class Taken(Incoming):
    """A receive that is over once all bytes are here; :meth:`open` builds the object, when nobody waits for it."""

    __slots__ = ("_opened_from",)

    def __init__(self, pair: Pair, channel: str, device: torch.device | None) -> None:
        super().__init__(pair, channel, device, None, has_handle=True)
        self._opened_from: tuple[Plan, torch.Tensor, Sequence[torch.Tensor]] | None = None

    def _build(self, plan: Plan, inline: torch.Tensor, segments: Sequence[torch.Tensor]) -> object:
        self._opened_from = plan, inline, segments
        return None

    def open(self) -> object:
        """Build the object.

        Raises:
            DecodeError, TrustError: it cannot be built here.
        """
        assert self._opened_from is not None
        plan, inline, segments = self._opened_from
        self._opened_from = None
        try:
            return super()._build(plan, inline, segments)
        except ObjcommError as error:
            raise error.locate(rank=self.pair.rank, peer=self.pair.peer, channel=self.channel) from error.__cause__


def opened(expected: Sequence[Taken], failures: Failures) -> dict[int, Any]:
    """The objects that came, by rank; none if anything has failed before one of them is built."""
    objects: dict[int, Any] = {}
    if not failures:
        for taken in expected:
            try:
                objects[taken.pair.peer] = taken.open()
            except ObjcommError as error:
                failures.keep(error)
    return objects


class Star:
    """One call in progress on this rank; ``centre`` is the rank that all the others exchange something with."""

    def __init__(self, call: Call, centre: int, channel: str, deadline: Deadline, device: torch.device | None) -> None:
        self.team = team = call.team
        self.channel = channel
        self.name = channel_name(channel)
        self.deadline = deadline
        self.device = device
        self.spokes = list(team.pairs.values()) if team.rank == centre else [team.pairs[centre]]
        self.failures = Failures(team.rank, channel, call, deadline)
        self._outgoings: list[Outgoing] = []

    def expect(self, *, bundles: bool) -> list[Any]:
        """Post the receives of this rank: of bundles that carry no object, or of objects."""
        made: list[Incoming] = [
            Arrival(pair, self.channel, self.name) if bundles else Taken(pair, self.channel, self.device)
            for pair in self.spokes
        ]
        for incoming in made:
            incoming.post()
        return made

    def take(self, expected: Sequence[Incoming]) -> None:
        """Wait for what was posted, and for all of it: the messages of a pair stay in step."""
        for incoming in expected:
            try:
                arrived: Any = incoming.wait(self.deadline)
            except ObjcommError as error:
                self.failures.note(error, incoming.pair)
                continue
            self.failures.present(incoming.pair)
            for piece in arrived or ():
                self.failures.hear(piece.parcel.notice)

    def say(self) -> None:
        """Send a bundle without an object: that nothing has failed, or what."""
        for pair in self.spokes:
            try:
                told = self.failures.told()
                self._outgoings.append(send_bundle(pair, told, self.name, self.channel, self.deadline))
            except ObjcommError as error:
                self.failures.note(error, pair)

    def encode(self, obj: object) -> tuple[Content, Encoded] | None:
        try:
            return prepare(obj, self.name)
        except BaseException as error:
            self.failures.own(error)
            return None

    def send(self, pair: Pair, message: tuple[Content, Encoded] | None) -> None:
        """Send an object, or what failed in its place."""
        try:
            if message is None or self.failures:
                error, rank = self.failures.first
                notify(pair, Kind.ERROR, notice_of(error, rank), self.channel, self.deadline)
            else:
                self._outgoings.append(post(pair, *message, self.channel, self.deadline))
                counters.objects_sent += 1
        except ObjcommError as failure:
            self.failures.note(failure, pair)

    def open(self, taken: Taken) -> object:
        """Build the one object of this rank."""
        try:
            return taken.open()
        except ObjcommError as error:
            self.failures.keep(error)
        self.failures.check()
        return None

    def finish(self) -> None:
        """Wait until nothing of this rank is needed any more, and raise what failed."""
        self.failures.wait_for(self._outgoings, self.deadline)
        self.failures.check()


def scatter(star: Star, objs: Mapping[int, object] | BaseException) -> None:
    """The centre's part of a scatter: ``objs`` by rank, or why there are none."""
    ready = star.expect(bundles=True)
    messages: dict[int, tuple[Content, Encoded] | None] = {}
    if isinstance(objs, BaseException):
        star.failures.own(objs)
    else:
        messages = {pair.peer: star.encode(objs[pair.peer]) for pair in star.spokes}
    star.take(ready)
    for pair in star.spokes:
        star.send(pair, messages.get(pair.peer))
    star.finish()


def scattered(star: Star) -> object:
    """Everybody else's part of a scatter: this rank's object."""
    expected = star.expect(bundles=False)
    star.say()
    star.take(expected)
    star.finish()
    return star.open(expected[0])


def gather(star: Star) -> dict[int, object]:
    """The centre's part of a gather: the others' objects by rank."""
    expected = star.expect(bundles=False)
    star.take(expected)
    star.say()
    # Nobody waits for this rank any more, unless it is for the verdict, which is on its way.
    objects = opened(expected, star.failures)
    star.finish()
    return objects


def give(star: Star, obj: object) -> None:
    """Everybody else's part of a gather; returns when the centre has everybody's object."""
    verdict = star.expect(bundles=True)
    message = star.encode(obj)
    star.send(star.spokes[0], message)
    star.take(verdict)
    star.finish()
