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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .errors import ObjcommError
from .incoming import Incoming
from .labels import where
from .outgoing import Outgoing
from .pair import Pair
from .pairs import all_pairs
from .wire import card

_HERE = str(Path(__file__).parent) + os.sep
# Of the lines of the program that the main thread is in.
_MOST_CALLERS = 3


class Awaited(NamedTuple):
    """What a thread waits for.

    Attributes:
        pair: of the rank that shall come.
        what: in words, behind "waits".
        key: of the thing itself; two looks at one wait give the same.
    """

    pair: Pair
    what: str
    key: int


class Wait(NamedTuple):
    """A thread that waits in objcomm.

    Attributes:
        awaited: what it waits for.
        call: the name of the public call.
        line: where the program called it.
        started: on the monotonic clock, in seconds.
        limit: its time-out, in seconds.
        thread: its name.
    """

    awaited: Awaited
    call: str
    line: str
    started: float
    limit: float
    thread: str

    def __str__(self) -> str:
        took = time.monotonic() - self.started
        return (
            f"{self.call} waits {self.awaited.what}, since {_clock(self.started)}, for {took:.1f} s of "
            f"{self.limit:g} s; called at {self.line}"
            + ("" if self.thread == "MainThread" else f", thread {self.thread}")
        )


def _incoming(there: Mapping[str, Any]) -> Awaited:
    incoming: Incoming = there["self"]
    pair = incoming.pair
    before = _place(pair, incoming)
    what = f"for message {pair.next_received + before} from rank {pair.peer}"
    what += f", behind {before} others" if before else ""
    return Awaited(pair, what + where(incoming.channel), id(incoming))


def _outgoing(there: Mapping[str, Any]) -> Awaited:
    outgoing: Outgoing = there["self"]
    what = f"for rank {outgoing.pair.peer} to take message {outgoing.sequence}{where(outgoing.channel)}"
    return Awaited(outgoing.pair, what, id(outgoing))


def _place(pair: Pair, incoming: Incoming) -> int:
    try:
        return list(pair.posted).index(incoming)
    except (ValueError, RuntimeError):  # it has just been over, or another thread is at it
        return 0


# The functions in which somebody waits, by their code, and what for, by their local variables. ``deadline`` is one.
_WAITING: dict[CodeType, Callable[[Mapping[str, Any]], Awaited | None]] = {
    Incoming.wait.__code__: _incoming,
    Outgoing.wait.__code__: _outgoing,
}


def tell_of(function: Any, awaited: Callable[[Mapping[str, Any]], Awaited | None]) -> None:
    """Layers above wait too: ``awaited`` says for what, given the local variables of ``function``."""
    _WAITING[function.__code__] = awaited


def report() -> str:
    """What this rank waits for, from whom, since when, what it did last, and what its peers last said.

    The same is printed to stderr when a transfer runs out of time, and when the process gets SIGUSR1, even while all of
    its threads wait inside a backend.

    >>> print(report())  # doctest: +ELLIPSIS
    objcomm: process ... has exchanged nothing yet; its main thread is at ...
    """
    pairs = [pair for pair in all_pairs() if pair.link.alive]
    if not pairs:
        return f"objcomm: process {os.getpid()} has exchanged nothing yet; its main thread is at {main_line()}"
    return "\n".join([*own_lines(pairs), *lines_of_peers(pairs, 0.0)])


def own_lines(pairs: list[Pair]) -> list[str]:
    """What this rank waits for and did last."""
    found = waits()
    lines = [f"objcomm on rank {pairs[0].rank}, process {os.getpid()}, at {time.strftime('%H:%M:%S')}:"]
    lines += [f"  {wait}" for wait in found]
    if not found:
        lines.append(f"  it does not wait in objcomm; its main thread is at {main_line()}")
    concerned = {id(wait.awaited.pair) for wait in found}
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
            parts.append(f"last {what} message {number}{where(channel)} at {_clock(when)}")
    flying = sorted(pair.in_flight.items())
    if flying:
        number, outgoing = flying[0]
        parts.append(
            f"{len(flying)} sent and not seen to be taken, the first is message {number}{where(outgoing.channel)}"
        )
    if pair.posted:
        names = sorted({where(incoming.channel) for incoming in list(pair.posted)})
        parts.append(f"{len(pair.posted)} receive{'s' * (len(pair.posted) > 1)} posted{','.join(names[:4])}")
    if pair.closed is not None:
        parts.append(f"closed since {type(pair.closed).__name__}: {pair.closed.text}")
    return "; ".join(parts)


def lines_of_peers(pairs: list[Pair], patience: float) -> list[str]:
    """What those that are waited for have said, or those that were, if nobody is."""
    wanted = [wait.awaited.pair for wait in waits()] or pairs
    lines = []
    # Whoever is about to raise an error asks a store that does not answer once, not for every peer.
    mute: set[int] = set()
    for pair in list({pair.peer: pair for pair in wanted}.values())[:8]:
        if id(pair.link.store) in mute:
            continue
        try:
            lines += [f"  {line}" for line in _lines_of(pair, patience)]
        except RuntimeError:
            mute.add(id(pair.link.store))
            lines.append(
                f"  the store of group {pair.group_name!r}, where ranks leave word, does not answer: the process that "
                "keeps it is frozen or gone"
            )
    return lines


def _lines_of(pair: Pair, patience: float) -> list[str]:
    """What the peer has said, or what it means that it has said nothing.

    Raises:
        RuntimeError: the store does not answer.
    """
    said = None
    end = time.monotonic() + patience
    try:
        said = card.said(pair.link.store, pair.peer)
        while said is None and time.monotonic() < end:
            time.sleep(0.05)
            said = card.said(pair.link.store, pair.peer)
    except ObjcommError as error:
        return [f"what rank {pair.peer} said cannot be read: {error.text}"]
    if said is None:
        return [_silence(pair)]
    return [f"what rank {pair.peer} last said:", *(f"| {line}" for line in said.splitlines())]


def _silence(pair: Pair) -> str:
    """What it means that the peer has said nothing."""
    if not card.has_come(pair.link.store, pair.peer):
        # It has no handler of the signal yet, which would end it.
        return (
            f"rank {pair.peer} has never come to a call of objcomm in group {pair.group_name!r}: it is somewhere "
            "before its first one, or it died"
        )
    return (
        f"rank {pair.peer} has said nothing: it has not waited long in objcomm, so it is elsewhere, or it died; "
        "SIGUSR1 makes it tell"
    )


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
    awaited: Awaited | None = None
    deadline: Any = None
    call = ""
    while frame is not None:
        # Whoever waits further out knows more of what for.
        asked = _WAITING.get(frame.f_code)
        if asked is not None:
            there = frame.f_locals
            found = asked(there) if "deadline" in there else None
            if found is not None:
                awaited, deadline, call = found, there["deadline"], frame.f_code.co_name
        elif awaited is not None:
            if not frame.f_code.co_filename.startswith(_HERE):
                break
            call = frame.f_code.co_name
        frame = frame.f_back
    if awaited is None or deadline is None:
        return None
    call = "wait() of a handle" if call == "wait" else call
    return Wait(awaited, call, frame_line(frame), deadline.at - deadline.seconds, deadline.seconds, thread)


def main_line() -> str:
    """Where the program's main thread is, outside of libraries, and who called that."""
    with _no_collection():
        innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines: list[str] = []
        while frame is not None and len(lines) < _MOST_CALLERS:
            if not is_library(frame.f_code.co_filename):
                lines.append(frame_line(frame))
            frame = frame.f_back
        return ", called at ".join(lines) or frame_line(innermost)


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


def is_library(path: str) -> bool:
    """Whether a file is no part of the program: objcomm's own, Python's, or installed."""
    return path.startswith((_HERE, os.path.dirname(os.__file__))) or f"site-packages{os.sep}" in path


def frame_line(frame: FrameType | None) -> str:
    """Where a frame is."""
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
