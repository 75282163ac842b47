"""Calls among several ranks in which everybody sends straight to everybody who needs it, all posted at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .codec import Encoded
from .errors import ObjcommError
from .incoming import Incoming
from .outgoing import Outgoing, notify, post, prepare
from .team import Team
from .trace import counters
from .wire.frame import Content, Kind, channel_name
from .wire.notice import notice_of
from .work import ObjectWork, deadline_for, watch

T = TypeVar("T")


class TeamWork(ObjectWork[T]):
    """Several messages in flight, whose objects become one result."""

    __slots__ = ("_error", "_incomings", "_result")

    def __init__(
        self,
        incomings: Mapping[int, Incoming],
        outgoings: Sequence[Outgoing],
        result: Callable[[dict[int, Any]], T],
        error: BaseException | None,
        timeout: float | None,
    ) -> None:
        super().__init__(outgoings, None, timeout)
        self._incomings = dict(incomings)
        self._result: Callable[[dict[int, Any]], T] | None = result
        self._error = error

    def wait(self, timeout: float | None = None) -> T:
        if self._result is not None:
            timeout = self._default_timeout if timeout is None else timeout
            self._take(timeout, self._result)
            self._result = None
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _take(self, timeout: float | None, result: Callable[[dict[int, Any]], T]) -> None:
        # What arrives comes first: a peer may take what is sent to it only after its own has been taken.
        objects: dict[int, Any] = {}
        outgoings = self._moving
        assert not isinstance(outgoings, Incoming)
        everything: list[Incoming | Outgoing] = [*self._incomings.values(), *outgoings]
        for moving in everything:
            try:
                got = moving.wait(deadline_for(moving.pair, timeout))
                if isinstance(moving, Incoming):
                    objects[moving.pair.peer] = got
            except ObjcommError as error:
                self._error = self._error or error
        self._moving = ()
        if self._error is None:
            self._value = result(objects)


def start(
    team: Team,
    sends: Mapping[int, object] | BaseException,
    sources: Sequence[int],
    result: Callable[[dict[int, Any]], T],
    *,
    channel: str,
    device: torch.device | None,
    timeout: float | None,
    async_op: bool,
    forbid_grad: bool = False,
) -> ObjectWork[T]:
    """Post the receives from ``sources`` and the sends, by rank; ``result`` makes the outcome of what arrived, by rank.

    Everything is encoded before anything leaves. What cannot be encoded is announced to all that were to receive
    something, and what the others send is still taken. Instead of the sends there may be the reason why there are none:
    all the others are told.
    """
    for pair in team.pairs.values():
        deadline_for(pair, timeout)
        pair.check_open()
    name = channel_name(channel)
    incomings = {}
    for rank in sources:
        incomings[rank] = Incoming(team.pairs[rank], channel, device, None, has_handle=True)
        team.pairs[rank].expect(incomings[rank])
    outgoings: list[Outgoing] = []
    failure: BaseException | None = None
    messages: dict[int, tuple[Content, Encoded]] = {}
    try:
        if isinstance(sends, BaseException):
            raise sends
        of_object: dict[int, tuple[Content, Encoded]] = {}
        for rank, obj in sends.items():
            if id(obj) not in of_object:
                of_object[id(obj)] = prepare(obj, name, forbid_grad=forbid_grad)
            messages[rank] = of_object[id(obj)]
    except BaseException as error:
        failure = error
        for rank in team.pairs if isinstance(sends, BaseException) else sends:
            pair = team.pairs[rank]
            notify(pair, Kind.ERROR, notice_of(error), channel, deadline_for(pair, timeout))
        if not isinstance(error, ObjcommError):
            raise
        error.locate(rank=team.rank, channel=channel, phase="encode")
    else:
        for rank, message in messages.items():
            pair = team.pairs[rank]
            if async_op:
                watch(pair)
            outgoings.append(post(pair, *message, channel, deadline_for(pair, timeout)))
        counters.objects_sent += len(outgoings)
    return TeamWork(incomings, outgoings, result, failure, timeout)
