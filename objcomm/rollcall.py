"""Which rank is missing from a call among several.

A rank that waits in vain often waits for one that is itself waiting, and a backend that gives up closes more than the
one connection. So who fails, or has been in a call for long, leaves a note in the group's store; who gives up then
reads the notes of the others, and names those that left none. A call that goes well leaves and reads nothing.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection

import torch.distributed as dist

from .team import Team
from .wire import roll

# A call that takes longer than this leaves a note: others may give up long before this rank does.
_LONG_SECONDS = 0.5
_LOOK_SECONDS = 0.25
# Who gave up waits this long for the notes of those that give up because of it.
_GRACE_SECONDS = 1.5
_POLL_SECONDS = 0.02
# Without calls for this long, the thread that looks after them sleeps until the next.
_IDLE_SECONDS = 5.0

_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()


class Call:
    """One call among the ranks of a team. It is the same number for all of them, since all make the same calls.

    >>> with Call(team) as call:  # doctest: +SKIP
    ...     call.missing()
    []
    """

    __slots__ = ("_key", "_number", "_store", "began", "noted", "team")

    def __init__(self, team: Team) -> None:
        self.team = team
        self._key = f"{zlib.crc32(repr(sorted(team.ranks)).encode()):08x}"
        of_group = _numbers.setdefault(team.group, {})
        self._number = of_group[self._key] = of_group.get(self._key, 0) + 1
        self._store = next(iter(team.pairs.values())).link.store
        self.began = time.monotonic()
        self.noted = False

    def __enter__(self) -> Call:
        _calls.add(self)
        _watcher.wake()
        if _yield is not None:
            # Where ranks share cores: let one that was interrupted while it wrote to this rank finish first. Its
            # backend holds a lock meanwhile, and would burn its core as soon as this rank answers.
            _yield()
        return self

    def __exit__(self, *_: object) -> None:
        _calls.discard(self)

    def note(self) -> None:
        """Leave a note that this rank is in the call. A store that does not answer keeps it from nobody but others."""
        self.noted = True
        try:
            roll.sign(self._store, self._key, self.team.rank, self._number)
        except RuntimeError:
            self.noted = False

    def missing(self, heard: Collection[int] = ()) -> list[int]:
        """The ranks that have left no note within a short time, beside those that were ``heard`` in this call."""
        if not self.noted:
            self.note()
        absent = [rank for rank in self.team.ranks if rank != self.team.rank and rank not in heard]
        end = time.monotonic() + _GRACE_SECONDS
        try:
            while absent:
                absent = [rank for rank in absent if roll.signed(self._store, self._key, rank) < self._number]
                if time.monotonic() > end:
                    break
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            return []
        return absent


class _Watcher:
    """Leaves the notes of calls that take long, from a thread of its own that exists once there was a call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()

    def wake(self) -> None:
        if not self._awake.is_set():
            self._awake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="objcomm-rollcall", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can be had any more, as when the interpreter ends
                    return

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            self._awake.wait()
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if _note_long_ones():
                quiet_since = now
            elif now - quiet_since > _IDLE_SECONDS:
                quiet_since = now
                self._awake.clear()


def _note_long_ones() -> bool:
    """Leave the notes that are due; whether there are calls at all.

    A function of its own: what the thread itself named would keep its group alive for as long as the thread sleeps.
    """
    calls = list(_calls)
    for call in calls:
        if not call.noted and time.monotonic() - call.began > _LONG_SECONDS:
            call.note()
    return bool(calls)


_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)
_calls: set[Call] = set()
_watcher = _Watcher()


def _after_fork() -> None:
    global _watcher
    _calls.clear()
    _watcher = _Watcher()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
