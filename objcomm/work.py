"""The handle of an operation in flight, and what becomes of operations that nobody waits for."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from .config import is_seconds, settings
from .deadline import Deadline
from .errors import ObjcommError, UsageError
from .incoming import Incoming
from .outgoing import Outgoing, notify
from .pair import Pair
from .pairs import all_pairs
from .transport import kind_here
from .wire.frame import Kind
from .wire.notice import Notice

T = TypeVar("T")
_log = logging.getLogger("objcomm")

# How long a process that ends waits for its peers to take what it sent and never waited for.
FLUSH_SECONDS = 30.0


class ObjectWork(Generic[T]):
    """An operation in flight; it owns every buffer of it.

    Dropping the handle loses nothing: a dropped send is completed in the background, a dropped receive is taken when
    its turn comes, and its object discarded.

    >>> work = ObjectWork.over({"loss": 0.5})
    >>> work.wait()
    {'loss': 0.5}
    """

    __slots__ = ("__weakref__", "_default_timeout", "_moving", "_value")

    def __init__(self, moving: Incoming | Sequence[Outgoing], value: T | None, timeout: float | None) -> None:
        self._moving = moving
        self._value = value
        self._default_timeout = timeout

    @classmethod
    def over(cls, value: T) -> ObjectWork[T]:
        """A handle of something that is over already."""
        return cls((), value, None)

    def wait(self, timeout: float | None = None) -> T:
        """Block until the operation is over.

        Args:
            timeout: seconds; ``None`` takes the call's, else the configured one, else the group's.

        Returns:
            The object: the one received, or the one that was sent. May be called again.

        Raises:
            TransferTimeout: nothing happened in time. The pair is closed then.
            ObjcommError: as the call that made the handle documents.
        """
        moving = self._moving
        timeout = self._default_timeout if timeout is None else timeout
        if isinstance(moving, Incoming):
            return cast(T, moving.wait(deadline_for(moving.pair, timeout)))
        if moving:
            deadline = deadline_for(moving[0].pair, timeout)
            for outgoing in moving:
                outgoing.wait(deadline)
            self._moving = ()
        return cast(T, self._value)

    def __repr__(self) -> str:
        moving = self._moving
        if isinstance(moving, Incoming):
            state = "over" if moving.done else "waiting"
            return f"<ObjectWork: receive from rank {moving.pair.peer}, channel {moving.channel!r}, {state}>"
        if not moving:
            return "<ObjectWork: over>"
        peers = ", ".join(str(outgoing.pair.peer) for outgoing in moving)
        return f"<ObjectWork: send to rank {peers}, channel {moving[0].channel!r}>"

    def __del__(self) -> None:
        # May run at any point of any thread: nothing here takes a lock or starts anything.
        moving = getattr(self, "_moving", ())
        if isinstance(moving, Incoming):
            return
        for outgoing in moving:
            worker = _dropped.get(outgoing.pair)
            if worker is not None:
                worker.waiting.put(outgoing)


def deadline_for(pair: Pair, timeout: float | None) -> Deadline:
    """The deadline of a call on ``pair``: its own time-out in seconds, else the configured one, else the group's.

    Raises:
        UsageError: ``timeout`` is no number of seconds.
    """
    if timeout is not None and not is_seconds(timeout):
        raise UsageError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if timeout is None:
        timeout = settings().timeout
    return Deadline(pair.link.timeout if timeout is None else timeout)


def watch(pair: Pair) -> None:
    """Make sure that sends on ``pair`` whose handles are dropped are completed, and their memory freed.

    A backend does not tell whether a send is over until it is waited for; so one thread a pair waits.
    """
    _worker(_dropped, pair, "sends")


def advance(incoming: Incoming) -> None:
    """Move a receive that was posted ahead on in the background, so that it overlaps with what the caller computes.

    A backend posts nothing by itself: without this, the segments would be posted when the handle is waited for. With an
    accelerator it is left to that wait, since the current device and stream are those of the caller's thread.
    """
    if kind_here() is None:
        worker = _worker(_ahead, incoming.pair, "receives")
        if worker is not None:
            worker.waiting.put(incoming)


class _Worker(threading.Thread):
    """Waits for what is handed to it, one after the other."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.waiting: queue.SimpleQueue[Incoming | Outgoing | None] = queue.SimpleQueue()
        self.moving: Incoming | Outgoing | None = None

    def run(self) -> None:
        while (moving := self.waiting.get()) is not None:
            self.moving = moving
            try:
                # A receive has the time-out of whoever waits for it; a send that nobody waits for has the group's.
                moving.wait(Deadline(None) if isinstance(moving, Incoming) else deadline_for(moving.pair, None))
            except ObjcommError as error:
                if isinstance(moving, Outgoing):
                    _log.warning("a send whose handle was dropped failed: %s", error)
            except BaseException:
                # An exit that the code of a class asked for while it was rebuilt: the handle tells.
                _log.debug("a receive was interrupted", exc_info=True)
            self.moving = moving = None

    def leave(self, deadline: Deadline) -> None:
        """Let sends finish, break off a receive, and end.

        A thread that is inside a backend when the interpreter ends takes the whole process down with it.
        """
        self.waiting.put(None)
        moving = self.moving
        if not isinstance(moving, Incoming):
            self.join(deadline.remaining())
            moving = self.moving
        if self.is_alive() and moving is not None:
            moving.pair.link.close()
            self.join(_BREAK_OFF_SECONDS)


_BREAK_OFF_SECONDS = 5.0
_dropped: weakref.WeakKeyDictionary[Pair, _Worker] = weakref.WeakKeyDictionary()
_ahead: weakref.WeakKeyDictionary[Pair, _Worker] = weakref.WeakKeyDictionary()
_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _worker(workers: weakref.WeakKeyDictionary[Pair, _Worker], pair: Pair, what: str) -> _Worker | None:
    """The thread of a pair; None if none can be had. Then nothing goes on in the background, but it goes on."""
    worker = workers.get(pair)
    if worker is None:
        made = _Worker(f"objcomm-{what}-{pair.rank}-{pair.peer}")
        worker = workers.setdefault(pair, made)
        if worker is made:
            try:
                worker.start()
            except RuntimeError as error:  # too many threads, or the interpreter ends
                _log.warning("no thread can be had for %s in the background: %s", what, error)
                workers.pop(pair, None)
                return None
            _workers.add(worker)
            weakref.finalize(pair, worker.waiting.put, None)
    return worker


@atexit.register
def _leave() -> None:
    """Before the process ends: let peers take what is in flight, then tell those that wait that none will come."""
    deadline = Deadline(FLUSH_SECONDS)
    notice = Notice("", _reason_to_leave())
    for pair in all_pairs():
        if pair.closed is not None or not pair.link.alive:
            continue
        try:
            for outgoing in list(pair.in_flight.values()):
                outgoing.wait(deadline)
        except ObjcommError as error:
            _log.warning("rank %d ends before rank %d took all that was sent: %s", pair.rank, pair.peer, error)
            continue
        try:
            if pair.link.can_say_goodbye:
                notify(pair, Kind.GOODBYE, notice, "", deadline)
        except (ObjcommError, RuntimeError):
            continue  # the peer, or the group, is gone already
    for worker in list(_workers):
        worker.leave(deadline)
    for pair in all_pairs():
        # A thread of the program's own that waits in a receive: see _Worker.leave.
        if pair.receiving.locked():
            pair.link.close()
            if pair.receiving.acquire(timeout=_BREAK_OFF_SECONDS):
                pair.receiving.release()


def _reason_to_leave() -> str:
    # Set by the interpreter when it has printed an exception that nothing caught.
    error = getattr(sys, "last_value", None)
    return "its process ended" if error is None else f"its process ended with {type(error).__name__}: {error}"
