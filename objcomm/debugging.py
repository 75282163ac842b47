"""Debug mode: the ranks compare what they call before they start, so that calls that do not match are told, not met."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from . import watcher
from .deadline import Deadline
from .diagnosis import Awaited, frame_line, is_library, tell_of
from .errors import ObjcommError, PeerError, ProtocolError, TransferTimeout
from .pair import Pair
from .pairs import all_pairs
from .team import Team
from .wire import card
from .work import deadline_for

_HERE = str(Path(__file__).parent) + os.sep
_POLL_SECONDS = 0.002
# Once two ranks are seen to differ, the others have this long to tell where they are.
_GRACE_SECONDS = 5.0
_BRANCHES = (
    "\nif these lines are one call in different branches of the program, use objcomm.debug(lines=False) or "
    "OBJCOMM_DEBUG=calls"
)
_STORE_HINT = "it lives in the process of one rank, which has ended or does not go on"


class Call(NamedTuple):
    """What one rank is about to do, as it stands in the store."""

    call: str
    arguments: str
    line: str

    def __str__(self) -> str:
        return f"{self.call}({self.arguments}) at {self.line}"


_ASKED = os.environ.get("OBJCOMM_DEBUG", "0")
# Callers look here first.
enabled = _ASKED not in ("", "0")
_lines = _ASKED != "calls"
watcher.talk(enabled)
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


def debug(on: bool = True, *, lines: bool = True) -> None:
    """Have every call among several ranks compared between them before it starts; call it on all ranks alike.

    Each rank tells the others, through the group's store, which call it makes, with what arguments, and on which line
    of the program. Where they differ, all ranks raise one error that shows every rank's line, before anything is sent,
    and everything stays usable. A rank that does not come is named, with what it last said, and the lines of those that
    did. It costs some milliseconds a call. ``OBJCOMM_DEBUG=1`` in the environment does the same, and
    ``OBJCOMM_DEBUG=calls`` the same without the lines.

    Args:
        on: whether to compare.
        lines: whether the same call on another line is a difference too. ``False`` is for programs in which one rank
            makes the call in another branch than the rest.

    >>> debug()
    >>> debug(False)
    """
    global enabled, _lines
    enabled, _lines = on, lines
    watcher.talk(on)


def cross_check(team: Team, call: str, timeout: float | None, **alike: object) -> None:
    """Wait until all of a team are about to make this call: for debug mode, where it is the first thing they do.

    Args:
        team: those that take part.
        call: the name of the public call.
        timeout: as the call has it.
        alike: the arguments that all of them must give alike.

    Raises:
        ProtocolError: another rank makes another call, on all ranks.
        TransferTimeout: a rank did not come in time.
        PeerError: the group's store does not answer.
    """
    if not team.pairs:
        return
    me = team.rank
    members = tuple(sorted(team.ranks))
    numbers = _numbers.setdefault(team.group, {})
    number = numbers[members] = numbers.get(members, -1) + 1
    pair = next(iter(team.pairs.values()))
    store = dist.PrefixStore(f"objcomm/debug/{','.join(map(str, members))}", pair.link.store)
    arguments = ", ".join(f"{name}={value!r}" for name, value in alike.items() if value is not False)
    mine = Call(call, arguments, _line())
    try:
        card.within(card.STORE_SECONDS, lambda: store.set(f"{number}/{me}", json.dumps(mine)))
        told = _collect(pair, store, number, members, deadline_for(pair, timeout), mine)
    except RuntimeError as error:
        if isinstance(error, ObjcommError):
            raise
        raise PeerError(f"the store of the group does not answer: {error}", rank=me, hint=_STORE_HINT) from error
    listing = "".join(f"\n  rank {rank}: {told.get(rank, 'has not come')}" for rank in members)
    if any(_differ(mine, other) for other in told.values()):
        same = len({other[:2] for other in told.values()}) == 1
        raise ProtocolError(
            f"the ranks do not make the same call (number {number} among these ranks)",
            rank=me,
            hint=f"nothing was sent:{listing}{_BRANCHES if same else ''}",
        )
    missing = [rank for rank in members if rank not in told]
    if missing:
        said = "".join(f"\n  rank {rank} last said: {_said(store_of=pair.link.store, rank=rank)}" for rank in missing)
        names = ", ".join(map(str, missing))
        raise TransferTimeout(
            f"rank {names} did not come to call number {number} among these ranks",
            rank=me,
            hint=f"nothing was sent:{listing}{said}",
        )
    # Whoever is here has read what was told before the call before.
    with contextlib.suppress(RuntimeError):
        card.within(card.STORE_SECONDS, lambda: store.delete_key(f"{number - 1}/{me}"))


def _collect(
    pair: Pair, store: dist.Store, number: int, ranks: Sequence[int], deadline: Deadline, mine: Call
) -> dict[int, Call]:
    """What each rank is about to do, those that came in time; ``pair`` is one with any of them."""
    told: dict[int, Call] = {}
    until = deadline.at
    nap = _POLL_SECONDS
    while True:
        for rank in ranks:
            if rank not in told:
                key = f"{number}/{rank}"
                found = card.within(card.STORE_SECONDS, lambda key=key: card.peek(store, key))  # type: ignore[misc]
                if found is not None:
                    told[rank] = Call(*json.loads(found))
                    if _differ(mine, told[rank]):
                        until = min(until, time.monotonic() + _GRACE_SECONDS)
        if len(told) == len(ranks) or time.monotonic() > until:
            return told
        time.sleep(nap)
        nap = min(0.05, nap * 1.2)


def _awaited(there: Mapping[str, Any]) -> Awaited | None:
    told, pair = there.get("told"), there["pair"]
    if told is None:
        return None
    missing = [rank for rank in there["ranks"] if rank not in told]
    if not missing:
        return None
    others = (each for each in all_pairs() if each.link.store is pair.link.store and each.peer == missing[0])
    names = ", ".join(map(str, missing))
    what = f"for rank {names} to come to call number {there['number']} among these ranks, in debug mode"
    return Awaited(next(others, pair), what, there["number"])


tell_of(_collect, _awaited)


def _differ(mine: Call, other: Call) -> bool:
    return mine != other if _lines else mine[:2] != other[:2]


def _said(store_of: dist.Store, rank: int) -> str:
    with contextlib.suppress(RuntimeError, ObjcommError):
        said = card.said(store_of, rank)
        if said:
            return said.replace("\n", "\n    ")
    return "nothing"


def _line() -> str:
    """Where the call stands, outside of objcomm, and where the program is, if a library made the call for it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    own = frame
    while own is not None and is_library(own.f_code.co_filename):
        own = own.f_back
    return frame_line(frame) + ("" if own is frame or own is None else f", for {frame_line(own)}")
