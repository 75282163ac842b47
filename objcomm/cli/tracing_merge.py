"""The traces of all ranks as one: read, brought to one clock, and each send tied to its receive."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class TraceError(Exception):
    """There is nothing to merge, or it is no trace."""


class Rank(NamedTuple):
    """One rank's file.

    Attributes:
        rank: its global rank.
        clock: the same for all ranks whose times can be compared as they are.
        wall: what to add to a time to get the wall clock of its host, in microseconds.
        events: in the order in which they ended.
    """

    rank: int
    clock: str
    wall: float
    events: list[Event]


def read(path: Path) -> list[Event]:
    """The events of a file, which may lack its end: a rank that dies does not finish its file.

    Raises:
        TraceError: it is no trace.
    """
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not text.startswith("["):
        raise TraceError(f"{path} is no trace of objcomm")
    if not text.endswith("]"):
        text = f"{text.rstrip(',')}]"
    try:
        events: list[Event] = json.loads(text)
    except (ValueError, RecursionError):
        # An event for which the disk had no room.
        whole, _, _ = text.rpartition(",\n")
        try:
            events = json.loads(f"{whole}]")
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path} is damaged: {error}") from None
    if not all(map(_is_event, events)):
        raise TraceError(f"{path} is damaged: not everything in it is an event")
    return events


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or type(event.get("ph")) is not str or type(event.get("name")) is not str:
        return False
    args = event.get("args", {})
    numbers = (event.get(name, 0) for name in ("ts", "dur"))
    whole = (event.get(name, 0) for name in ("pid", "tid"))
    return (
        isinstance(args, dict)
        and type(args.get("message", "")) is str
        and all(type(number) in (int, float) for number in numbers)
        and all(type(number) is int for number in whole)
    )


def load(folder: Path) -> list[Rank]:
    """Every rank's trace in a folder, by rank.

    Raises:
        TraceError: there is none, or one is damaged.
    """
    ranks = []
    for path in sorted(folder.glob("rank-*.json")):
        events = read(path)
        told = next((event for event in events if event["name"] == "objcomm_clock"), None)
        if told is None:
            raise TraceError(f"{path} does not say by which clock it was written")
        args = told.get("args", {})
        clock, wall, at = args.get("clock"), args.get("wall_us"), args.get("ts")
        if type(clock) is not str or not {type(wall), type(at)} <= {int, float} or "pid" not in told:
            raise TraceError(f"{path} is damaged: it does not say by which clock it was written")
        ranks.append(Rank(told["pid"], clock, wall - at, events))
    if not ranks:
        raise TraceError(f"there are no traces in {folder}: run the program with OBJCOMM_TRACE={folder}")
    return sorted(ranks)


def flows(ranks: Sequence[Rank]) -> list[tuple[Event, Event]]:
    """The event that posted a message and the one in which its head arrived, of every message that did."""
    posted: defaultdict[str, list[Event]] = defaultdict(list)
    arrived: defaultdict[str, list[Event]] = defaultdict(list)
    for rank in ranks:
        for event in rank.events:
            name = event.get("args", {}).get("message")
            if name is not None:
                (posted if event["name"] == "post" else arrived)[name].append(event)
    # A group that is made anew counts from the beginning: the first send of a name belongs to its first receive.
    return [pair for name, sends in posted.items() for pair in zip(sends, arrived[name], strict=False)]


def offsets(ranks: Sequence[Rank]) -> dict[str, float]:
    """What to add to the times of each clock, in microseconds, so that all of them are those of the first rank's.

    Processes of one host share a clock. Two hosts' are brought together by the messages between them: none arrives
    before it was sent, so those that took the shortest time in each direction bound the difference from both sides, and
    its middle is taken, as NTP does. Where messages went one way only, the wall clocks decide within that bound.
    """
    clock_of = {rank.rank: rank.clock for rank in ranks}
    wall = {rank.clock: rank.wall for rank in reversed(ranks)}
    shortest: dict[tuple[str, str], float] = {}
    for sent, got in flows(ranks):
        key = clock_of[sent["pid"]], clock_of[got["pid"]]
        took = got["ts"] + got["dur"] - sent["ts"]
        shortest[key] = min(took, shortest.get(key, took))
    found = {ranks[0].clock: 0.0}
    waiting = [clock for clock in wall if clock not in found]
    while waiting:
        # One with messages in both directions first, then with any; else by the wall clocks.
        known, clock = max(
            ((known, clock) for known in found for clock in waiting),
            key=lambda pair: (pair in shortest) + (pair[::-1] in shortest),
        )
        found[clock] = found[known] + _offset(
            wall[clock] - wall[known], shortest.get((known, clock)), shortest.get((clock, known))
        )
        waiting.remove(clock)
    return found


def _offset(wall: float, there: float | None, back: float | None) -> float:
    """What to add to another clock: ``there`` is how long a message to it seems to take, ``back`` from it."""
    if there is not None and back is not None:
        return (back - there) / 2
    if there is not None:
        return max(wall, -there)
    return wall if back is None else min(wall, back)


def merge(ranks: Sequence[Rank]) -> dict[str, Any]:
    """One Chrome trace of all ranks, its times counted from the first event, with an arrow for every message."""
    shift = offsets(ranks)
    timed = [event for rank in ranks for event in rank.events if "ts" in event]
    start = min(
        (event["ts"] + shift[rank.clock] for rank in ranks for event in rank.events if "ts" in event), default=0.0
    )
    events: list[Event] = [event for rank in ranks for event in rank.events if "ts" not in event]
    by_id: dict[int, Event] = {}
    for rank in ranks:
        for event in rank.events:
            if "ts" in event:
                by_id[id(event)] = {**event, "ts": event["ts"] + shift[rank.clock] - start}
    events += [by_id[id(event)] for event in timed]
    for number, (sent, got) in enumerate(flows(ranks)):
        events += arrow(number, by_id[id(sent)], by_id[id(got)])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def arrow(number: int, sent: Mapping[str, Any], got: Mapping[str, Any]) -> Iterable[Event]:
    """From the beginning of one event to the end of another; viewers bind each end to the event around it."""
    common = {"cat": "objcomm", "name": "message", "id": number}
    yield {**common, "ph": "s", "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]}
    end = got["ts"] + got["dur"]
    yield {**common, "ph": "f", "bp": "e", "pid": got["pid"], "tid": got["tid"], "ts": end}
