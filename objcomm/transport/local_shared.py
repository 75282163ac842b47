"""Work on a stretch of memory that several threads share out among themselves."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

import torch.distributed as dist

# More do not make a copy faster: the memory is what is waited for.
_MOST_THREADS = 4


def ranks_here() -> int:
    """How many ranks this host has, as far as can be told."""
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1
    except ValueError:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    return max(1, ranks)


def threads_for_copies() -> int:
    """How many threads may share one copy, if cores are there: of two ranks, the one that is read only waits."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(_MOST_THREADS, allowed, 2 * cores // ranks_here()))


class Shared:
    """Pieces of a stretch of ``nbytes``, each done once by whoever is free.

    Args:
        do: called with the start and the end of a piece; it must let go of the interpreter's lock to be of use here.
    """

    def __init__(self, do: Callable[[int, int], None], nbytes: int, piece_bytes: int) -> None:
        self._do = do
        self._nbytes = nbytes
        self._piece_bytes = piece_bytes
        self._pieces = itertools.count()
        self._stopped = False
        self._error: Exception | None = None
        self._busy: list[threading.Lock] = []

    def run(self, threads: int, keep_on: Callable[[], None]) -> None:
        """Do all of it. When this returns or raises, no thread is at work any more.

        ``keep_on`` is called in this thread after each of its pieces, and ends it by raising.

        Raises:
            Exception: what ``do`` raised, in whichever thread.
        """
        self._busy = [threading.Lock() for _ in range(threads - 1)]
        try:
            for busy in self._busy:
                try:
                    threading.Thread(target=self._help, args=(busy,), name="objcomm-copy", daemon=True).start()
                except RuntimeError:  # there are too many, or the interpreter ends
                    break
            while self._piece():
                keep_on()
        finally:
            self._stop()
        if self._error is not None:
            raise self._error

    def _piece(self) -> bool:
        """Do the next piece; False if there is none."""
        # In this order: what was taken is done, whoever stops meanwhile.
        if self._stopped:
            return False
        start = next(self._pieces) * self._piece_bytes
        if start >= self._nbytes:
            return False
        try:
            self._do(start, min(self._nbytes, start + self._piece_bytes))
        except Exception as error:
            self._error = error
            self._stopped = True
            return False
        return True

    def _help(self, busy: threading.Lock) -> None:
        more = True
        while more:
            with busy:
                more = self._piece()

    def _stop(self) -> None:
        """Wait until every other thread has finished the piece that it has in hand, whatever interrupts.

        A thread that begins later finds that all is over and touches nothing.
        """
        interrupt: BaseException | None = None
        self._stopped = True
        for busy in self._busy:
            held: list[bool] = []
            while not held:
                try:
                    # Noted by the very call that takes the lock, so that no signal can come between the two.
                    held.extend(map(busy.acquire, (True,)))
                except BaseException as error:
                    interrupt = error
            busy.release()
        if interrupt is not None:
            raise interrupt
