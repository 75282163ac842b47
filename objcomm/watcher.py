"""Who asks for a diagnosis: a time-out, SIGUSR1, and a thread that notices long waits."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from .diagnosis import lines_of_peers, own_lines, report, say, show, waits
from .errors import ObjcommError, TransferTimeout
from .pair import Pair, ask_when_closed
from .pairs import all_pairs, ask_when_first_used, forget_destroyed

_WATCH_SECONDS = 2.0
# A wait of this long, or of half of its time-out, is told to the peers.
_LONG_SECONDS = 10.0
# A peer whose time runs out at the same moment may be about to say something.
_HEAR_SECONDS = 0.5
_END_SECONDS = 3.0
_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def _out_of_time(pair: Pair, error: ObjcommError) -> None:
    """A transfer of ``pair`` has failed: say and print what is known, before the error is raised."""
    if not isinstance(error, TransferTimeout) or _switched_off():
        return
    try:
        own = own_lines([pair, *(other for other in all_pairs() if other is not pair and other.link.alive)])
        say([pair], "\n".join(own))
        show("\n".join([f"objcomm: {error.text}", *own, *lines_of_peers([pair], _HEAR_SECONDS)]))
    except Exception as failure:  # the error itself must be raised whatever happens here
        show(f"objcomm: no diagnosis: {failure!r}")


class _Watcher(threading.Thread):
    """Prints a report when SIGUSR1 comes, wherever the main thread is, and tells peers of long waits."""

    def __init__(self) -> None:
        super().__init__(name="objcomm-diagnosis", daemon=True)
        self.asked, self.asking = os.pipe()
        os.set_blocking(self.asking, False)
        os.set_blocking(self.asked, False)
        self.forward: int | None = None
        self._told: object = None

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.asked], [], [], _WATCH_SECONDS)
            signals = b""
            if ready:
                with contextlib.suppress(OSError):
                    signals = os.read(self.asked, 4096)
            if b"\0" in signals:
                return
            if self.forward is not None and signals:
                # Somebody else was to be woken up by signals before.
                with contextlib.suppress(OSError):
                    os.write(self.forward, signals)
            try:
                # Every signal writes its byte; one that the program has taken over since is the program's.
                if signal.SIGUSR1 in signals and signal.getsignal(signal.SIGUSR1) is _ignore:
                    say(all_pairs(), "\n".join(own_lines(all_pairs())) if all_pairs() else "")
                    show(report())
                self._tell()
                forget_destroyed()
            except Exception as error:
                show(f"objcomm: no diagnosis: {error!r}")

    def _tell(self) -> None:
        """Leave word in the store when a wait takes long, once for each wait, and when it is over."""
        now = time.monotonic()
        long = [wait for wait in waits() if now - wait.started > min(_LONG_SECONDS, wait.limit / 2)]
        key = [(wait.awaited.key, wait.started) for wait in long] or None
        if key != self._told or _talkative:
            self._told = key
            pairs = [pair for pair in all_pairs() if pair.link.alive]
            if pairs:
                say(
                    pairs,
                    "\n".join(own_lines(pairs)) if long or _talkative else f"it went on at {time.strftime('%H:%M:%S')}",
                )

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.asking, b"\0")
        self.join(_END_SECONDS)


_watcher: _Watcher | None = None
_talkative = False


def talk(always: bool) -> None:
    """Whether to tell the peers all the time what this rank does, and not only when a wait takes long."""
    global _talkative
    _talkative = always


def watch() -> None:
    """Begin to watch over this process, unless ``OBJCOMM_DIAGNOSIS=0``. A handler of SIGUSR1 that is there stays.

    That is done at the first transfer; with ``OBJCOMM_DIAGNOSIS=1`` when objcomm is imported, so that ranks tell where
    they are before it, too.
    """
    global _watcher
    if _watcher is not None or _switched_off():
        return
    _watcher = _Watcher()
    try:
        _watcher.start()
    except RuntimeError:  # no thread can be had any more, as when the interpreter ends
        return
    if threading.current_thread() is threading.main_thread() and not _taken():
        # The handler does nothing: a byte on the pipe is what wakes the watcher, and C code writes it at once.
        signal.signal(signal.SIGUSR1, _ignore)
        before = signal.set_wakeup_fd(_watcher.asking, warn_on_full_buffer=False)
        _watcher.forward = before if before >= 0 else None


def _ignore(number: int, frame: FrameType | None) -> None:
    # Somebody who came later may have taken the pipe's place.
    watcher = _watcher
    if watcher is None:
        return
    current = signal.set_wakeup_fd(-1)
    if current >= 0:
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
    if current != watcher.asking:
        with contextlib.suppress(OSError):
            os.write(watcher.asking, bytes([number]))


def _switched_off() -> bool:
    return os.environ.get("OBJCOMM_DIAGNOSIS") == "0"


def _taken() -> bool:
    """Whether somebody handles SIGUSR1 already, in Python or, as faulthandler does, below it, or is going to."""
    if not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return True
    if "SLURM_JOB_ID" in os.environ and not _LIGHTNING.isdisjoint(sys.modules):
        # Slurm sends it before a job's time is over, and Lightning puts the job back into the queue then: but not if
        # somebody else has the signal when its trainer starts.
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def _after_fork() -> None:
    """A child has neither the thread nor a pipe of its own: what it does first with objcomm makes both anew."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is None:
        return
    with contextlib.suppress(ValueError, OSError):
        if signal.getsignal(signal.SIGUSR1) is _ignore:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            signal.set_wakeup_fd(-1 if watcher.forward is None else watcher.forward)
    for end in (watcher.asked, watcher.asking):
        with contextlib.suppress(OSError):
            os.close(end)


@atexit.register
def _leave() -> None:
    if _watcher is not None and _watcher.is_alive():
        _watcher.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
ask_when_closed(_out_of_time)
ask_when_first_used(watch)
if os.environ.get("OBJCOMM_DIAGNOSIS") == "1":
    watch()
