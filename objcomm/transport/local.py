"""The way between two ranks that finds out whether they are on one host, and then goes around the network stack.

Finding out takes both ends, and a call that only posts must not wait for the other end. So the first operation starts a
thread that meets the peer in the group's store; until the choice is made, operations queue up. Both ends choose alike:
the connection within the host, or the process group as if this file did not exist.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..deadline import Deadline
from ..errors import ObjcommError, PeerError, TransferTimeout
from .base import Failed, Pending
from .local_connect import Apart, Both
from .local_contact import Contact
from .local_meeting import Store

_log = logging.getLogger("objcomm")

_EXIT_SECONDS = 1.0


class Way(Protocol):
    """How transfers between two ranks travel."""

    def send(self, tensor: torch.Tensor) -> Pending: ...
    def recv(self, tensor: torch.Tensor) -> Pending: ...
    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending: ...
    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending: ...
    def close(self) -> None: ...


class Direct:
    """The connection within the host."""

    def __init__(self, made: Both, peer: int) -> None:
        self._connection = made.connection
        self._peer = peer
        self.send = made.out.send
        self.send_all = made.out.send_all
        self.recv = made.into.recv
        self.recv_all = made.into.recv_all

    @property
    def failure(self) -> ObjcommError | None:
        return self._connection.failure

    def close(self) -> None:
        self._connection.fail(PeerError(f"this rank broke off its transfers with rank {self._peer}"))


class LocalLane:
    """Both directions between this rank and one peer, for CPU memory: directly, or over ``group_way``.

    Args:
        store: gives the group's store, on a connection in which nobody waits.
        look: raises if the peer is known to be gone; it is asked while the peer has not made contact.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        store: Callable[[], Store],
        rank: int,
        peer: int,
        ranks: tuple[int, int],
        group_way: Way,
        timeout: float,
        *,
        allowed: bool,
        look: Callable[[], None],
    ) -> None:
        """``ranks`` are those of this rank and of the peer within the group."""
        self._rank = rank
        self._peer = peer
        low, high = sorted(ranks)
        name = f"objcomm/local/{low}-{high}"
        self._contact = Contact(store, name, (rank, peer), lower=ranks[0] == low, allowed=allowed)
        self._group_way = group_way
        self._look = look
        self._timeout = timeout
        self._until = 0.0
        self._lock = threading.Lock()
        self._queue: list[_Queued] = []
        self._way: Way | None = None
        self._how = f"not decided: rank {peer} has not made contact"
        self._chosen = threading.Event()  # or failed
        self._failure: ObjcommError | None = None
        self._thread: threading.Thread | None = None
        _lanes.add(self)
        if self._contact.why_not:
            self._choose_group(self._contact.why_not)
            self._start(self._decline)

    @property
    def direct(self) -> bool:
        """Whether the connection within the host is in use."""
        return isinstance(self._way, Direct)

    @property
    def chosen(self) -> bool:
        """Whether it is decided which way transfers take."""
        return self._way is not None

    def describe(self) -> str:
        """In words: how bytes travel, and why."""
        way = self._way
        failure = way.failure if isinstance(way, Direct) else self._failure
        return self._how if failure is None else f"closed: {failure.text}"

    def send(self, tensor: torch.Tensor) -> Pending:
        way = self._way
        return self._later("send", tensor) if way is None else way.send(tensor)

    def recv(self, tensor: torch.Tensor) -> Pending:
        way = self._way
        return self._later("recv", tensor) if way is None else way.recv(tensor)

    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        way = self._way
        return self._later("send_all", tensors) if way is None else way.send_all(tensors)

    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        way = self._way
        return self._later("recv_all", tensors) if way is None else way.recv_all(tensors)

    def close(self) -> None:
        """Make every transfer fail, on both ends. Never raises."""
        with self._lock:
            way = self._way
            if way is None:
                self._fail(PeerError(f"this rank broke off its transfers with rank {self._peer}"))
        if way is not None:
            way.close()

    def await_choice(self, deadline: Deadline) -> None:
        """Wait until operations are no longer queued.

        Raises:
            TransferTimeout: the peer did not make contact in time; the lane is closed.
        """
        self._until = max(self._until, deadline.at)
        if not self._chosen.wait(deadline.remaining()):
            with self._lock:
                if not self._chosen.is_set():
                    text = f"rank {self._peer} did not come within {deadline.seconds:g} s"
                    raise self._fail(TransferTimeout(text))

    def failure_of(self) -> ObjcommError:
        """The error of an operation that was still queued when the lane was closed."""
        failure = self._failure or PeerError("the transfer was lost")
        return type(failure)(failure.text, hint=failure.hint)

    def _later(self, name: str, what: Any) -> Pending:
        with self._lock:
            if self._failure is not None:
                raise PeerError(f"the connection to rank {self._peer} is closed since: {self._failure.text}")
            if self._way is not None:
                posted: Pending = getattr(self._way, name)(what)
                return posted
            queued = _Queued(self, name, what)
            self._queue.append(queued)
            if self._thread is None:
                self._until = Deadline(self._timeout).at
                self._start(self._make_contact)
        return queued

    def _start(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name=f"objcomm-local-{self._rank}-{self._peer}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter ends
            self._fail(PeerError(f"no thread can be had to make contact: {error}"))

    def _fail(self, error: ObjcommError) -> ObjcommError:
        """Close the lane before a way was chosen. The lock is held."""
        if self._failure is None:
            self._failure = error.kept()
            self._queue.clear()
            self._chosen.set()
            self._contact.stopped.set()
        return error

    def _decline(self) -> None:
        try:
            self._contact.decline()
        except RuntimeError as error:
            _log.debug("rank %d could not tell rank %d which way it takes: %s", self._rank, self._peer, error)

    def _make_contact(self) -> None:
        try:
            try:
                made = self._contact.make(self._check_wanted, self._look)
            except Apart as apart:
                self._choose_group(str(apart))
            else:
                self._choose(Direct(made, self._peer), f"within the host; {made.how}")
        except Exception as error:
            if not isinstance(error, ObjcommError):
                error = PeerError(f"contact with rank {self._peer} could not be made: {error}")
            with self._lock:
                self._fail(error)
                reason = self._failure or error
            if self._contact.leave(reason.text):
                self._group_way.close()

    def _choose_group(self, why: str) -> None:
        self._choose(self._group_way, f"over the process group: {why}")

    def _choose(self, way: Way, how: str) -> None:
        """From now on everything goes this way; first what was queued, in its order."""
        with self._lock:
            if self._failure is not None:
                way.close()
                raise self.failure_of()
            for queued in self._queue:
                queued.launch(way)
            self._queue.clear()
            self._how = how
            self._way = way
            self._chosen.set()
        _log.debug("rank %d and rank %d exchange %s", self._rank, self._peer, how)

    def _check_wanted(self) -> None:
        """Raise if nobody waits for the choice any more."""
        if self._failure is not None:
            raise self.failure_of()
        if time.monotonic() > self._until:
            raise TransferTimeout(f"rank {self._peer} did not come within {self._timeout:g} s")

    def end(self) -> None:
        """The process ends: a thread that is inside a store then takes the process down with it."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            with self._lock:
                if self._way is None:
                    self._fail(PeerError("its process ended"))
            thread.join(_EXIT_SECONDS)

    def after_fork(self) -> None:
        """In a forked child: let go of what was inherited."""
        self._contact.stop_listening()


class _Queued:
    """An operation whose way is not chosen yet. Keeps alive the memory."""

    __slots__ = ("_lane", "_name", "_pending", "_what")

    def __init__(self, lane: LocalLane, name: str, what: Any) -> None:
        self._lane = lane
        self._name = name
        self._what = what
        self._pending: Pending | None = None

    def launch(self, way: Way) -> None:
        try:
            self._pending = getattr(way, self._name)(self._what)
        except ObjcommError as error:
            self._pending = Failed(error)
        self._what = None

    def wait(self, deadline: Deadline) -> None:
        if self._pending is None:
            self._lane.await_choice(deadline)
            if self._pending is None:
                self._pending = Failed(self._lane.failure_of())
        self._pending.wait(deadline)


_lanes: weakref.WeakSet[LocalLane] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for lane in list(_lanes):
        lane.end()


def _after_fork() -> None:
    for lane in list(_lanes):
        lane.after_fork()
    _lanes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
