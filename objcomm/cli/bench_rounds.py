"""The measurement itself: methods take turns in rounds, so that what the machine does meanwhile hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import objcomm

from .bench_memory import peaks
from .bench_methods import METHODS, Bench, Method, told
from .payloads import Payload, sent_bytes

# However slow a payload is, and however little time there is for it.
_FEWEST_ROUNDS = 3
_MOST_REPEATS = 500
_SHORT_SECONDS = 0.02
# What is shorter stays within a core's own caches, and says nothing of memory.
_SHORTEST_COPY = 1 << 20

Report = Callable[[int, str], None]
Row = dict[str, Any]


def measure(
    bench: Bench, payload: Payload, names: Sequence[str], rounds: int, seconds: float, report: Report, *, extras: bool
) -> Row:
    """Measure one payload, and return on rank 0 and rank 1 alike, all times in seconds:

    ``name``, ``title``, ``bytes`` (what objcomm sends), ``rounds`` (how many there were), ``methods`` (by name:
    ``median``, ``low`` and ``high``, the quartiles, and ``times`` of all rounds), ``left_out`` (a reason by method),
    ``error`` (why there is nothing of all this), and with ``extras`` ``messages`` (of one object) and ``memory``
    (see :func:`peaks`).

    Args:
        rounds: so many, or as many as fit into ``seconds``, but no fewer than three.
        report: is told the number of rounds that are over, and what happens next.
    """
    row: Row = {"name": payload.name, "title": payload.title, "bytes": None, "rounds": 0}
    row.update(methods={}, left_out={}, error=None)
    report(0, "making it")
    torch.manual_seed(0)
    failure, obj = None, None
    try:
        obj = payload.make()
        row["bytes"] = sent_bytes(obj)
    except Exception as error:
        failure = told(error)
    theirs: tuple[str | None, int | None] = bench.exchange((failure, row["bytes"]))
    row["error"] = failure or theirs[0]
    if row["error"] is not None:
        return row
    if bench.rank == 1:
        row["bytes"] = theirs[1]
    if row["bytes"] < _SHORTEST_COPY:
        names = [name for name in names if name != "memcpy"]
    methods = _usable(bench, bench.methods(payload, obj, row["bytes"], names), row["left_out"], report)
    times = _rounds(bench, methods, rounds, seconds, report)
    row["rounds"] = max(map(len, times.values()), default=0)
    row["methods"] = {name: _summary(found) for name, found in times.items()}
    del methods
    if extras and "objcomm" in times:
        report(row["rounds"], "counting messages and memory")
        row["messages"] = _messages(bench, obj)
        row["memory"] = peaks(bench, payload, row["bytes"])
    return row


def _usable(bench: Bench, methods: dict[str, Method | str], left_out: dict[str, str], report: Report) -> list[Method]:
    """Those that bring the object to the other side, both ways."""
    mine = {name: method for name, method in methods.items() if isinstance(method, str)}
    left_out.update({**bench.exchange(mine), **mine})
    found = []
    for name, method in methods.items():
        if name in left_out or isinstance(method, str):
            continue
        report(0, f"trying {METHODS[name][0]}")
        reason = _try(bench, method)
        if reason is None:
            found.append(method)
        else:
            left_out[name] = reason
    return found


def _try(bench: Bench, method: Method) -> str | None:
    """Send once each way, and return why that does not work, if it does not."""
    for sender in (0, 1):
        mine = None
        try:
            (method.send if bench.rank == sender else method.receive)()
        except objcomm.TransferTimeout:
            raise
        except Exception as error:
            mine = told(error)
        # Fails where the other rank is gone.
        theirs = bench.exchange(mine)
        # That of the sender is the cause of that of the receiver.
        reason = (mine or theirs) if bench.rank == sender else (theirs or mine)
        if reason is not None:
            return str(reason)
    return None


def _rounds(
    bench: Bench, methods: Sequence[Method], rounds: int, seconds: float, report: Report
) -> dict[str, list[float]]:
    """Seconds for one way of each method, by round."""
    # The other rank may have to wait for as long.
    slice_seconds = min(seconds / rounds / max(1, len(methods)), bench.timeout / 4)
    repeats = {method.name: _repeats(bench, method, slice_seconds) for method in methods}
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    end = time.monotonic() + seconds
    for done in range(rounds):
        # Not always after the same one: what a method leaves in caches and memory is the next one's luck.
        for place in range(len(methods)):
            method = methods[(done + place) % len(methods)]
            report(done, method.name)
            times[method.name].append(_one_way(bench, method, repeats[method.name]))
        if bench.tell(int(done + 1 >= min(_FEWEST_ROUNDS, rounds) and time.monotonic() > end)):
            break
    return times


def _repeats(bench: Bench, method: Method, slice_seconds: float) -> int:
    took = _one_way(bench, method, 1)
    if bench.tell(int(took < _SHORT_SECONDS)):
        took = _one_way(bench, method, 3)
    trip = took if method.one_way else 2 * took
    return bench.tell(max(1, min(_MOST_REPEATS, int(slice_seconds / max(trip, 1e-9)))))


def _one_way(bench: Bench, method: Method, repeats: int) -> float:
    """Seconds for one way: half of a round trip, the mean of ``repeats`` round trips one after the other."""
    send, receive = method.send, method.receive
    bench.barrier()
    start = time.perf_counter()
    if method.one_way:
        for _ in range(repeats):
            send()
        return (time.perf_counter() - start) / repeats
    if bench.rank == 0:
        for _ in range(repeats):
            send()
            receive()
    else:
        for _ in range(repeats):
            receive()
            send()
    return (time.perf_counter() - start) / repeats / 2


def _summary(times: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median": median, "low": low, "high": high, "times": times}


def _messages(bench: Bench, obj: Any) -> int:
    before = objcomm.stats()["messages_sent"]
    if bench.rank == 0:
        objcomm.send_object(obj, bench.peer)
    else:
        objcomm.recv_object(bench.peer)
    return bench.tell(objcomm.stats()["messages_sent"] - before)
