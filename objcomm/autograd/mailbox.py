"""Gradients on their way back: one message for each backward pass of an object, in whatever order the peer sends them.

The message is an ordinary object on a channel of its own, ``[sequence, count, {number: gradient, ...}]``: the sequence
number that the object had on its way there, how many of its tensors required grad there, and the gradients, by the
numbers of the codec. A tensor that has no gradient is not in it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ..deadline import Deadline
from ..errors import ObjcommError, ProtocolError
from ..incoming import Incoming
from ..p2p import expect
from ..pair import Pair
from ..work import advance

CHANNEL = "objcomm.gradients"


class Gradients(NamedTuple):
    """What came back for an object in one message: how many tensors required grad there, and gradients by number."""

    leaves: int
    by_number: dict[int, torch.Tensor]


class Addressee:
    """Somebody who waits for the gradients of one object."""

    __slots__ = ("__weakref__", "arrived")

    def __init__(self) -> None:
        self.arrived: deque[Gradients] = deque()


class Mailbox:
    """All gradients that come back from one peer in one group. Threads may share it.

    What arrives for an object whose handle was dropped is dropped too.
    """

    def __init__(self) -> None:
        self._addressees: WeakValueDictionary[int, Addressee] = WeakValueDictionary()
        self._posted: deque[Incoming] = deque()
        self._changed = threading.Condition()
        self._receiving = False
        self._adding = threading.Lock()

    @contextmanager
    def adding(self, addressee: Addressee) -> Iterator[Callable[[int], None]]:
        """An object is sent meanwhile. The caller says its sequence number, whose gradients ``addressee`` then gets.

        No gradient can be taken before its addressee is known.
        """
        with self._adding:
            yield lambda sequence: self._addressees.__setitem__(sequence, addressee)

    def post(self, pair: Pair) -> None:
        """Post the receive of one message ahead, for whichever object it is."""
        incoming = expect(pair, CHANNEL, None, None, has_handle=True)
        advance(incoming)
        with self._changed:
            self._posted.append(incoming)

    def take(self, pair: Pair, addressee: Addressee, deadline: Deadline) -> Gradients:
        """Wait for the next message of one addressee; others get theirs meanwhile.

        Raises:
            TransferTimeout: it did not come in time.
            ProtocolError: what came is no gradient.
            ObjcommError: as for any receive.
        """
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: addressee.arrived or not self._receiving, deadline.remaining()):
                    raise pair.busy("waiting for gradients from")
                if addressee.arrived:
                    return addressee.arrived.popleft()
                self._receiving = True
            try:
                self._receive(pair, deadline)
            finally:
                with self._changed:
                    self._receiving = False
                    self._changed.notify_all()

    def _receive(self, pair: Pair, deadline: Deadline) -> None:
        incoming = self._posted.popleft() if self._posted else expect(pair, CHANNEL, None, None, has_handle=False)
        sequence, gradients = _read(incoming.wait(deadline), pair)
        with self._adding:
            addressee = self._addressees.get(sequence)
        if addressee is not None:
            addressee.arrived.append(gradients)


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


@contextmanager
def about(channel: str, what: str) -> Iterator[None]:
    """Errors of a transfer of gradients name the channel of the object, and say what is about it."""
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
            hint=error.hint,
        ) from error
