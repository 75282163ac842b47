"""Calls among several ranks in which everybody sends straight to everybody who needs it, all posted at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from .codec import Encoded
from .counters import counters
from .deadline import Deadline
from .errors import ObjcommError
from .failures import Failures, placed
from .incoming import Incoming
from .labels import plain
from .outgoing import Outgoing, notify, post, prepare
from .rollcall import Call
from .star import Taken, opened
from .team import Team
from .wire.frame import Content, Kind, channel_name
from .wire.notice import notice_of
from .work import ObjectWork, advance, deadline_for, watch

T = TypeVar("T")


class TeamWork(ObjectWork[T]):
    """Several messages in flight, whose objects become one result."""

    __slots__ = ("_channel", "_result", "error", "expected")

    def __init__(
        self,
        expected: Sequence[Taken],
        outgoings: Sequence[Outgoing],
        result: Callable[[dict[int, Any]], T],
        channel: str,
        error: BaseException | None,
        timeout: float | None,
    ) -> None:
        super().__init__(outgoings, None, timeout)
        self.expected = expected
        self._result: Callable[[dict[int, Any]], T] | None = result
        self._channel = channel
        self.error = error

    def wait(self, timeout: float | None = None) -> T:
        if self._result is not None:
            pair = self._everything[0].pair
            failures = Failures(pair.rank, self._channel)
            if self.error is not None:
                failures.own(self.error)
            self.settle(failures, deadline_for(pair, self._default_timeout if timeout is None else timeout))
        if self.error is not None:
            raise self.error
        return cast(T, self._value)

    @property
    def outgoings(self) -> Sequence[Outgoing]:
        assert not isinstance(self._moving, Incoming)
        return self._moving

    @property
    def _everything(self) -> list[Taken | Outgoing]:
        return [*self.expected, *self.outgoings]

    def settle(self, failures: Failures, deadline: Deadline) -> None:
        """Take all that comes, even if some of it fails: the messages of every pair stay in step."""
        result, self._result = self._result, None
        assert result is not None
        # What arrives comes first: a peer may take what is sent to it only after its own has been taken.
        for taken in self.expected:
            try:
                taken.wait(deadline)
                failures.present(taken.pair)
            except ObjcommError as error:
                failures.note(error, taken.pair)
        objects = opened(self.expected, failures)
        failures.wait_for(self.outgoings, deadline)
        self._moving = ()
        try:
            failures.check()
            self._value = result(objects)
        except BaseException as error:
            self.error = error

    def __repr__(self) -> str:
        if self._result is None:
            return "<ObjectWork: over>"
        peers = ", ".join(str(moving.pair.peer) for moving in self._everything)
        return f"<ObjectWork: among several ranks, with rank {peers}, channel {plain(self._channel)!r}>"


def start(
    team: Team,
    sends: Mapping[int, object] | BaseException,
    sources: Sequence[int],
    result: Callable[[dict[int, Any]], T],
    *,
    channel: str,
    device: torch.device | None,
    timeout: float | None,
    forbid_grad: bool = False,
) -> TeamWork[T]:
    """Post the receives from ``sources`` and the sends, by rank; ``result`` makes the outcome of what arrived, by rank.

    Everything is encoded before anything leaves. What cannot be encoded is announced to all that were to receive
    something, and what the others send is still taken. Instead of the sends there may be the reason why there are none:
    all the others are told.
    """
    deadline = team.deadline(timeout)
    name = channel_name(channel)
    expected = [Taken(team.pairs[rank], channel, device) for rank in sources]
    for taken in expected:
        taken.post()
    outgoings: list[Outgoing] = []
    failure: BaseException | None = None
    try:
        if isinstance(sends, BaseException):
            raise sends
        messages = _encoded(sends, name, forbid_grad)
    except BaseException as error:
        failure = error
        for rank in team.pairs if isinstance(sends, BaseException) else sends:
            with contextlib.suppress(ObjcommError):  # that pair is closed, and its rank knows
                notify(team.pairs[rank], Kind.ERROR, notice_of(error), channel, deadline)
        if isinstance(error, ObjcommError):
            placed(error, team.rank, channel, phase="encode")
        if not expected:
            raise
    else:
        for rank, message in messages.items():
            try:
                outgoings.append(post(team.pairs[rank], *message, channel, deadline))
            except ObjcommError as error:
                failure = failure or placed(error, team.rank, channel, rank)
        counters.objects_sent += len(outgoings)
        if failure is not None and not expected and not outgoings:
            raise failure
    return TeamWork(expected, outgoings, result, channel, failure, timeout)


def in_background(work: TeamWork[T]) -> TeamWork[T]:
    """Let what is in flight move on while nobody waits for it."""
    for outgoing in work.outgoings:
        watch(outgoing.pair)
    for taken in work.expected:
        advance(taken)
    return work


def together(
    call: Call,
    sends: Mapping[int, object] | BaseException,
    result: Callable[[dict[int, Any]], T],
    *,
    channel: str,
    device: torch.device | None,
    timeout: float | None,
) -> T:
    """Exchange objects between all ranks of a call, and return when all of it is over."""
    deadline = call.team.deadline(timeout)
    sources = list(call.team.pairs)
    work = start(call.team, sends, sources, result, channel=channel, device=device, timeout=timeout)
    failures = Failures(call.team.rank, channel, call, deadline)
    if work.error is not None:
        failures.own(work.error)
    work.settle(failures, deadline)
    return work.wait()


def _encoded(sends: Mapping[int, object], name: bytes, forbid_grad: bool) -> dict[int, tuple[Content, Encoded]]:
    """The messages by rank; an object that goes to several is encoded once."""
    of_object: dict[int, tuple[Content, Encoded]] = {}
    messages = {}
    for rank, obj in sends.items():
        if id(obj) not in of_object:
            of_object[id(obj)] = prepare(obj, name, forbid_grad=forbid_grad)
        messages[rank] = of_object[id(obj)]
    return messages
