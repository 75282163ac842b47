"""Gradients on their way back: one message for each backward pass of an object, in whatever order the peer sends them.

The message is an ordinary object on a channel of its own, ``[sequence, count, {number: gradient, ...}]``: the sequence
number that the object had on its way there, how many of its tensors required grad there, and the gradients, by the
numbers of the codec. A tensor that has no gradient is not in it. Such a message may come where a receive waits for an
object: it goes into the mailbox, and the receive goes on waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ..deadline import Deadline
from ..diagnosis import Awaited, tell_of
from ..errors import ObjcommError, ProtocolError, TransferTimeout
from ..incoming import Incoming, take_one
from ..labels import where
from ..pair import Pair

CHANNEL = "objcomm.gradients"


class Gradients(NamedTuple):
    """What came back for an object in one message: how many tensors required grad there, and gradients by number."""

    leaves: int
    by_number: dict[int, torch.Tensor]


class Addressee:
    """Somebody who waits for the gradients of one object; ``channel`` is that object's."""

    __slots__ = ("__weakref__", "arrived", "channel")

    def __init__(self, channel: str) -> None:
        self.arrived: deque[Gradients] = deque()
        self.channel = channel


class Mailbox:
    """All gradients that come back from one peer in one group. Threads may share it.

    What arrives for an object whose handle was dropped is dropped too.
    """

    channel = CHANNEL

    def __init__(self) -> None:
        self._addressees: WeakValueDictionary[int, Addressee] = WeakValueDictionary()
        self._errors: deque[ObjcommError] = deque()
        self._lock = threading.Lock()
        self._adding = threading.Lock()

    @contextmanager
    def adding(self, addressee: Addressee) -> Iterator[Callable[[int], None]]:
        """An object is sent meanwhile. The caller says its sequence number, whose gradients ``addressee`` then gets.

        No gradient can be delivered before its addressee is known.
        """
        with self._adding:
            yield lambda sequence: self._addressees.__setitem__(sequence, addressee)

    def take(self, pair: Pair, addressee: Addressee, deadline: Deadline) -> Gradients:
        """Wait for the next message of one addressee. One thread at a time receives, and others get theirs meanwhile.

        Raises:
            TransferTimeout: it did not come in time.
            ProtocolError: what came is no gradient.
            ObjcommError: as for any receive.
        """
        while True:
            with self._lock:
                if addressee.arrived:
                    return addressee.arrived.popleft()
                if self._errors:
                    raise self._errors.popleft()
            taken = pair.turn.take(lambda: addressee.arrived or self._errors, deadline)
            if taken is None:
                raise pair.busy("receiving from")
            if taken:
                try:
                    if not (addressee.arrived or self._errors):
                        self._receive(pair, deadline)
                finally:
                    pair.release_receiving()

    def _receive(self, pair: Pair, deadline: Deadline) -> None:
        """Take one message off the pair, whoever it is for."""
        pair.check_open()
        own = Incoming(pair, CHANNEL, None, None, has_handle=False)
        pair.post_if_idle(own)
        take_one(pair, deadline)
        if own.done:
            self.deliver(own)
        elif pair.closed is not None:
            raise pair.closed

    def deliver(self, incoming: Incoming) -> None:
        """Hand over what a receive that is over has got."""
        try:
            sequence, gradients = _read(incoming.wait(Deadline(0)), incoming.pair)
        except ObjcommError as error:
            self._errors.append(error)
        else:
            with self._adding:
                addressee = self._addressees.get(sequence)
            if addressee is not None:
                addressee.arrived.append(gradients)
        incoming.pair.turn.changed()


def mailbox_of(pair: Pair) -> Mailbox:
    """The mailbox of a pair, always the same."""
    if pair.mailbox is None:
        with _making:
            if pair.mailbox is None:
                pair.mailbox = Mailbox()
    found: Mailbox = pair.mailbox
    return found


_making = threading.Lock()


def message(sequence: int, count: int, by_number: dict[int, torch.Tensor]) -> list[Any]:
    """The object that travels."""
    return [sequence, count, by_number]


def _read(obj: Any, pair: Pair) -> tuple[int, Gradients]:
    if type(obj) is list and len(obj) == 3 and type(obj[2]) is dict:
        sequence, count, by_number = obj
        good = all(type(number) is int and isinstance(each, torch.Tensor) for number, each in by_number.items())
        if good and type(sequence) is int and 0 <= sequence < pair.next_sent and type(count) is int:
            return sequence, Gradients(count, by_number)
    raise ProtocolError("what came back is no message of gradients", rank=pair.rank, peer=pair.peer, phase="decode")


def _awaited(there: Mapping[str, Any]) -> Awaited:
    pair: Pair = there["pair"]
    addressee: Addressee = there["addressee"]
    what = f"for gradients from rank {pair.peer} of the object that was sent{where(addressee.channel)}"
    return Awaited(pair, what, id(addressee))


tell_of(Mailbox.take, _awaited)


@contextmanager
def about(channel: str, what: str, when_late: str) -> Iterator[None]:
    """Errors of a transfer of gradients name the channel of the object, and say what is about it.

    ``when_late`` is what the other rank has to do, for when it did not in time.
    """
    try:
        yield
    except ObjcommError as error:
        raise type(error)(
            f"{what}: {error.text}",
            rank=error.rank,
            peer=error.peer,
            channel=channel,
            phase=error.phase,
            path=error.path,
            hint=error.hint or (when_late if isinstance(error, TransferTimeout) else None),
        ) from error
