"""Why nothing moves: what this rank waits for, from whom, since when, what it did last, and what its peers last said.

Everything is read off the threads' stacks and the pairs when somebody asks: a transfer that goes well pays nothing for
it. Asking are a time-out, SIGUSR1, and :func:`report`. A rank whose wait takes long leaves what it waits for in the
group's store, so that a peer that runs out of time can tell what this rank was doing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .errors import ObjcommError
from .incoming import Incoming
from .outgoing import Outgoing
from .pair import Pair
from .pairs import all_pairs
from .wire import card

_HERE = str(Path(__file__).parent) + os.sep


class Wait(NamedTuple):
    """A thread that waits in objcomm.

    Attributes:
        moving: the message it waits for.
        call: the name of the public call.
        line: where the program called it.
        started: on the monotonic clock, in seconds.
        limit: its time-out, in seconds.
        thread: its name.
    """

    moving: Incoming | Outgoing
    call: str
    line: str
    started: float
    limit: float
    thread: str

    def __str__(self) -> str:
        pair, channel = self.moving.pair, self.moving.channel
        if isinstance(self.moving, Outgoing):
            what = f"for rank {pair.peer} to take message {self.moving.sequence}"
        else:
            before = _place(pair, self.moving)
            what = f"for message {pair.next_received + before} from rank {pair.peer}"
            what += f", behind {before} others" if before else ""
        where = f" on channel {channel!r}" if channel else ""
        took = time.monotonic() - self.started
        return (
            f"{self.call} waits {what}{where}, since {_clock(self.started)}, for {took:.1f} s of {self.limit:g} s; "
            f"called at {self.line}" + ("" if self.thread == "MainThread" else f", thread {self.thread}")
        )


def _place(pair: Pair, incoming: Incoming) -> int:
    try:
        return list(pair.posted).index(incoming)
    except (ValueError, RuntimeError):  # it has just been over, or another thread is at it
        return 0


def report() -> str:
    """What this rank waits for, from whom, since when, what it did last, and what its peers last said.

    The same is printed to stderr when a transfer runs out of time, and when the process gets SIGUSR1, even while all of
    its threads wait inside a backend.

    >>> report()
    'objcomm: this process has exchanged nothing yet'
    """
    pairs = [pair for pair in all_pairs() if pair.link.alive]
    if not pairs:
        return "objcomm: this process has exchanged nothing yet"
    return "\n".join([*own_lines(pairs), *lines_of_peers(pairs, 0.0)])


def own_lines(pairs: list[Pair]) -> list[str]:
    """What this rank waits for and did last."""
    found = waits()
    lines = [f"objcomm on rank {pairs[0].rank}, process {os.getpid()}, at {time.strftime('%H:%M:%S')}:"]
    lines += [f"  {wait}" for wait in found]
    if not found:
        lines.append(f"  it does not wait in objcomm; its main thread is at {main_line()}")
    concerned = {id(wait.moving.pair) for wait in found}
    for pair in sorted(pairs, key=lambda pair: (id(pair) not in concerned, pair.peer))[:16]:
        try:
            past = _past(pair)
        except RuntimeError:  # another thread adds or takes away something at this moment
            past = "messages come and go"
        lines.append(f"  rank {pair.peer}, group {pair.group_name!r}: {past}")
    return lines


def _past(pair: Pair) -> str:
    parts = []
    for what, last in (("received", pair.last_received), ("sent", pair.last_sent)):
        if last is None:
            parts.append(f"nothing {what} yet")
        else:
            channel, number, when = last
            where = f" on channel {channel!r}" if channel else ""
            parts.append(f"last {what} message {number}{where} at {_clock(when)}")
    flying = sorted(pair.in_flight.items())
    if flying:
        number, outgoing = flying[0]
        where = f" on channel {outgoing.channel!r}" if outgoing.channel else ""
        parts.append(f"{len(flying)} sent and not seen to be taken, the first is message {number}{where}")
    if pair.posted:
        names = sorted({repr(incoming.channel) for incoming in list(pair.posted)})
        parts.append(f"{len(pair.posted)} receives posted, on channel {', '.join(names[:4])}")
    if pair.closed is not None:
        parts.append(f"closed since {type(pair.closed).__name__}: {pair.closed.text}")
    return "; ".join(parts)


def lines_of_peers(pairs: list[Pair], patience: float) -> list[str]:
    """What those that are waited for have said, or those that were, if nobody is."""
    wanted = [wait.moving.pair for wait in waits()] or pairs
    lines = []
    for pair in list({pair.peer: pair for pair in wanted}.values())[:8]:
        said = None
        end = time.monotonic() + patience
        with contextlib.suppress(RuntimeError, ObjcommError):
            said = card.said(pair.link.store, pair.peer)
            while said is None and time.monotonic() < end:
                time.sleep(0.05)
                said = card.said(pair.link.store, pair.peer)
        if said is None:
            lines.append(
                f"  rank {pair.peer} has said nothing: it has not waited long in objcomm, so it is elsewhere, or it "
                "died; SIGUSR1 makes it tell"
            )
        else:
            lines += [f"  what rank {pair.peer} last said:", *(f"  | {line}" for line in said.splitlines())]
    return lines


def waits() -> list[Wait]:
    """What the threads of this process wait for in objcomm, those of the program first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    with _no_collection():
        for ident, frame in sys._current_frames().items():
            wait = _wait_in(frame, names.get(ident, str(ident)))
            if wait is not None:
                found.append(wait)
    # One that waits on behalf of a handle says nothing that the thread which waits for the handle does not.
    own = [wait for wait in found if not wait.thread.startswith("objcomm-")]
    return own or found


def _wait_in(frame: FrameType | None, thread: str) -> Wait | None:
    moving: Any = None
    deadline: Any = None
    call = ""
    while frame is not None:
        inside = frame.f_code.co_filename.startswith(_HERE)
        if moving is None:
            if frame.f_code in _WAITING:
                there = frame.f_locals
                moving, deadline, call = there.get("self"), there.get("deadline"), frame.f_code.co_name
        elif inside:
            call = frame.f_code.co_name
        else:
            break
        frame = frame.f_back
    if moving is None or deadline is None:
        return None
    call = "wait() of a handle" if call == "wait" else call
    return Wait(moving, call, _line(frame), deadline.at - deadline.seconds, deadline.seconds, thread)


_WAITING = {Incoming.wait.__code__, Outgoing.wait.__code__}


def main_line() -> str:
    """Where the program's main thread is, outside of objcomm and torch."""
    with _no_collection():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        inner = frame
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        return _line(frame or inner)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """While stacks of other threads are read.

    Before Python 3.12 making a frame object may collect garbage, what is collected may let other threads run, and the
    frame is then made of one that they have left: the process dies.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _is_library(path: str) -> bool:
    return path.startswith((_HERE, os.path.dirname(os.__file__))) or f"site-packages{os.sep}" in path


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return "the end of its stack"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - at)))


def say(pairs: list[Pair], text: str) -> None:
    """Leave ``text`` for the peers."""
    for pair in {id(pair.link.store): pair for pair in pairs}.values():
        with contextlib.suppress(RuntimeError):
            card.say(pair.link.store, pair.rank, text)


def show(text: str) -> None:
    """Print to stderr, whatever has become of it."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)
