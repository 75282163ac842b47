"""Ranks that exchange random objects by random calls for as long as it takes, with their memory watched.

``python -m benchmarks.soak --minutes 10`` starts its ranks itself. Each step is a call drawn at random: between two
ranks or among several, blocking or with a handle, within the host or over gloo alone, or one that must fail. Every
object carries a checksum over types, values, dtypes, shapes and sharing, and who sent it to whom in which step. Now
and then a group is made, broken by a time-out, and destroyed.

What comes out: calls, objects, bytes, errors that nobody asked for (0, or the run has failed), and for each rank how
memory, file descriptors and threads went. A slope of memory is that of the least-squares line after a warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import objcomm
from objcomm.cli.bench_machine import machine

from .soak_calls import Caller

_STEPS_PER_LOOK = 20
# Of the whole time: what is cached and pooled has been by then.
_WARM_UP = 0.25
_POOL_BYTES = 32 << 20


def run(seconds: float, seed: int, *, samples: int = 100, steps_per_break: int = 400) -> dict[str, Any]:
    """Soak this rank; the default group is there already. Every rank calls this.

    Args:
        samples: how often memory is looked at.
        steps_per_break: after how many steps a group is made and broken.

    Returns:
        What this rank has done and seen.
    """
    world: Any = dist.group.WORLD
    over_gloo: Any = dist.new_group(timeout=timedelta(seconds=120))
    objcomm.configure(local_transport=False)
    objcomm.all_gather_objects(None, group=over_gloo)
    # Little is kept for what comes next, so that it is full before the memory is looked at.
    objcomm.configure(local_transport=True, pool_bytes=_POOL_BYTES)
    caller = Caller(seed, [world, over_gloo])
    before = objcomm.stats()
    errors: list[str] = []
    seen: list[dict[str, float]] = []
    began = time.monotonic()
    next_look, steps = 0.0, 0
    try:
        while True:
            elapsed = time.monotonic() - began
            say = (elapsed < seconds, elapsed >= next_look) if dist.get_rank() == 0 else None
            going_on, look = objcomm.broadcast_object(say, 0)
            if look or not going_on:
                seen.append(_look(elapsed))
                next_look = elapsed + seconds / samples
            if not going_on:
                break
            for _ in range(_STEPS_PER_LOOK):
                caller.step()
                steps += 1
                if steps % steps_per_break == steps_per_break // 2:
                    caller.a_group_that_breaks()
    except Exception:
        errors.append(traceback.format_exc())
        print(f"rank {dist.get_rank()}: {errors[0]}", file=sys.stderr, flush=True)
    stats = objcomm.stats()
    return {
        "rank": dist.get_rank(),
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "checked": caller.checked,
        "calls": dict(caller.calls),
        "errors": errors,
        "stats": {name: stats[name] - before[name] for name in stats},
        "in_use_mb_per_hour": round(slope(seen, "in_use", seconds * _WARM_UP) * 3600 / 1e6, 2),
        "resident_mb_per_hour": round(slope(seen, "rss", seconds * _WARM_UP) * 3600 / 1e6, 2),
        "first": seen[0] if seen else {},
        "after_warm_up": next((look for look in seen if look["at"] >= seconds * _WARM_UP), {}),
        "last": seen[-1] if seen else {},
        "highest": {name: max(look[name] for look in seen) for name in seen[0]} if seen else {},
        "samples": seen,
    }


def slope(seen: list[dict[str, float]], name: str, after: float) -> float:
    """How much a figure rises each second, by the line of least squares through all that was seen after a time.

    >>> slope([{"at": at, "rss": 5 + 2 * at} for at in (0.0, 1.0, 2.0)], "rss", 0.5)
    2.0
    """
    points = [(look["at"], look[name]) for look in seen if look["at"] >= after]
    if len(points) < 2:
        return 0.0
    middle = sum(at for at, _ in points) / len(points)
    spread = sum((at - middle) ** 2 for at, _ in points)
    return sum((at - middle) * value for at, value in points) / spread if spread else 0.0


class _Usage(ctypes.Structure):
    """``struct mallinfo2``."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def in_use() -> int:
    """Bytes that this process has of the C library, tensors and Python's own included; 0 where that does not tell.

    Unlike the resident memory it knows no fragmentation: a leak rises here too, and nothing else for long.
    """
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = _Usage
    usage = tell()
    return int(usage.uordblks) + int(usage.hblkhd)


def _look(at: float) -> dict[str, float]:
    gc.collect()
    # What the C library keeps for later would look like a leak that comes and goes.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "at": round(at, 2),
        "rss": resident,
        "in_use": in_use(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def _worker(rank: int, port: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120))
    report = run(options.minutes * 60, options.seed)
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    if not report["errors"]:
        dist.destroy_process_group()


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all ranks together."""
    together = {
        name: sum(report["stats"][name] for report in reports)
        for name in ("objects_received", "messages_received", "bytes_received")
    }
    return {
        "ranks": len(reports),
        "seconds": max(report["seconds"] for report in reports),
        "steps": max(report["steps"] for report in reports),
        "checked": sum(report["checked"] for report in reports),
        **together,
        "errors": sum(len(report["errors"]) for report in reports),
        **{name: [report[name] for report in reports] for name in ("in_use_mb_per_hour", "resident_mb_per_hour")},
        **{
            f"{name}_mb": {
                when: [round(report[when][name] / 1e6, 1) for report in reports]
                for when in ("first", "after_warm_up", "last", "highest")
                if all(report[when] for report in reports)
            }
            for name in ("in_use", "rss")
        },
        "descriptors": [[report[when].get("descriptors") for when in ("first", "last")] for report in reports],
        "threads": [[report[when].get("threads") for when in ("first", "last")] for report in reports],
        "calls": reports[0]["calls"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--ranks", type=int, default=4, help="processes, all on this host")
    parser.add_argument("--seed", type=int, default=0, help="of the calls and the objects")
    parser.add_argument("--json", metavar="FILE", default="benchmarks/results/soak.json", help="where figures go")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        mp.spawn(_worker, (store.port, options, folder), options.ranks)  # type: ignore[no-untyped-call]
        reports = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    figures = {"machine": machine(), "seed": options.seed, **summary(reports)}
    print(json.dumps(figures, indent=1))
    for report in reports:
        for error in report["errors"]:
            print(f"rank {report['rank']}: {error}")
    rows = [{name: report[name] for name in ("rank", "samples")} for report in reports]
    Path(options.json).write_text(json.dumps({**figures, "of_each_rank": rows}))
    if figures["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
