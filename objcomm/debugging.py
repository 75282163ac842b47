"""Debug mode: the ranks compare what they call before they start, so that calls that do not match are told, not met."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from . import watcher
from .deadline import Deadline
from .errors import ObjcommError, ProtocolError, TransferTimeout
from .pairs import pair_for
from .transport import rank_in, standing
from .wire import card
from .work import deadline_for

_HERE = str(Path(__file__).parent) + os.sep
_POLL_SECONDS = 0.002
# Once two ranks are seen to differ, the others have this long to tell where they are.
_GRACE_SECONDS = 5.0


class Call(NamedTuple):
    """What one rank is about to do, as it stands in the store."""

    call: str
    arguments: str
    line: str

    def __str__(self) -> str:
        return f"{self.call}({self.arguments}) at {self.line}"


# Callers look here first.
enabled = os.environ.get("OBJCOMM_DEBUG", "0") not in ("", "0")
_lines = True
watcher.talk(enabled)
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


def debug(on: bool = True, *, lines: bool = True) -> None:
    """Have every call among several ranks compared between them before it starts; call it on all ranks alike.

    Each rank tells the others, through the group's store, which call it makes, with what arguments, and on which line
    of the program. Where they differ, all ranks raise one error that shows every rank's line, before anything is sent,
    and everything stays usable. A rank that does not come is named, with what it last said, and the lines of those that
    did. It costs some milliseconds a call. ``OBJCOMM_DEBUG=1`` in the environment does the same.

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


def cross_check(
    group: dist.ProcessGroup | None, ranks: Sequence[int], call: str, arguments: str, timeout: float | None
) -> None:
    """Wait until all of ``ranks`` are about to make this call: for debug mode, where it is the first thing they do.

    Raises:
        ProtocolError: another rank makes another call, on all ranks.
        TransferTimeout: a rank did not come in time.
    """
    me = rank_in(group)
    others = [rank for rank in ranks if rank != me]
    if not others or me not in ranks:
        return
    pg = standing(group)
    assert pg is not None
    numbers = _numbers.setdefault(pg, {})
    members = tuple(ranks)
    number = numbers[members] = numbers.get(members, -1) + 1
    pair = pair_for(group, others[0], None, "ranks")
    store = dist.PrefixStore(f"objcomm/debug/{','.join(map(str, sorted(members)))}", pair.link.store)
    mine = Call(call, arguments, _line())
    store.set(f"{number}/{me}", json.dumps(mine))
    told = _collect(store, number, members, deadline_for(pair, timeout), mine)
    listing = "".join(f"\n  rank {rank}: {told.get(rank, 'has not come')}" for rank in members)
    if any(_differ(mine, other) for other in told.values()):
        raise ProtocolError(
            f"the ranks do not make the same call (number {number} among these ranks):{listing}\n",
            rank=me,
            hint="nothing was sent; if these lines are one call in different branches, use objcomm.debug(lines=False)",
        )
    missing = [rank for rank in members if rank not in told]
    if missing:
        said = "".join(f"\n  rank {rank} last said: {_said(store_of=pair.link.store, rank=rank)}" for rank in missing)
        names = ", ".join(map(str, missing))
        raise TransferTimeout(
            f"rank {names} did not come to call number {number} among these ranks:{listing}{said}\n", rank=me
        )
    # Whoever is here has read what was told before the call before.
    with contextlib.suppress(RuntimeError):
        store.delete_key(f"{number - 1}/{me}")


def _collect(store: dist.Store, number: int, ranks: Sequence[int], deadline: Deadline, mine: Call) -> dict[int, Call]:
    told: dict[int, Call] = {}
    until = deadline.at
    nap = _POLL_SECONDS
    while True:
        for rank in ranks:
            if rank not in told and store.check([f"{number}/{rank}"]):
                told[rank] = read_call(store.get(f"{number}/{rank}"))
                if _differ(mine, told[rank]):
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
        if len(told) == len(ranks) or time.monotonic() > until:
            return told
        time.sleep(nap)
        nap = min(0.05, nap * 1.2)


def read_call(text: bytes) -> Call:
    """What a rank has told of its call.

    Raises:
        ProtocolError: what lies there is none.
    """
    try:
        call, arguments, line = fields = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        fields = [None]
    if type(fields) is not list or any(type(field) is not str for field in fields):
        raise ProtocolError(f"what lies in the group's store is no call: {text[:80]!r}")
    return Call(call, arguments, line)


def _differ(mine: Call, other: Call) -> bool:
    return mine != other if _lines else mine[:2] != other[:2]


def _said(store_of: dist.Store, rank: int) -> str:
    with contextlib.suppress(RuntimeError, ObjcommError):
        said = card.said(store_of, rank)
        if said:
            return said.replace("\n", "\n    ")
    return "nothing"


def _line() -> str:
    """Where the program is, outside of objcomm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
