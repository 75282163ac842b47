"""A lock that is waited for only as long as there is a reason to have it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .deadline import Deadline


class Turn:
    """What one thread at a time does, and what others may find done by it.

    >>> import threading
    >>> lock = threading.Lock()
    >>> turn = Turn(lock)
    >>> turn.take(lambda: False, Deadline(1))
    True
    >>> turn.take(lambda: "done", Deadline(1))
    False
    """

    __slots__ = ("_changed", "_lock", "_waiting")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._changed = threading.Condition()
        self._waiting = 0

    def take(self, over: Callable[[], object], deadline: Deadline) -> bool | None:
        """Take the lock, unless there is nothing left to wait for: ``over`` tells, and may change.

        Returns True if it was taken, False if it is not needed, None where neither happened in time.
        """
        if self._lock.acquire(blocking=False):
            return True
        with self._changed:
            # Who changes something looks at this number afterwards, and ``over`` is asked after this.
            self._waiting += 1
            try:
                while not over():
                    if self._lock.acquire(blocking=False):
                        return True
                    if not self._changed.wait(deadline.remaining()):
                        return False if over() else None
                return False
            finally:
                self._waiting -= 1

    def changed(self) -> None:
        """The lock was released, or what ``over`` tells may have changed."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
