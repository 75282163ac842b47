"""Objects among four ranks over gloo: objcomm's calls against torch's, in turns within one run.

Run it with ``python -m benchmarks.collectives``; it starts its ranks itself. A time is that of a call: as many calls as
fit in a slice, one after the other on all ranks, up to the barrier after the last, divided by their number; the median
of all rounds is shown. ``raw bytes`` is the backend's own collective with as many bytes in memory that was used before:
the floor. Messages are those that all ranks sent for one call. The peak memory of a gather is that of a rank that is
not the destination, beyond the object that it has anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import objcomm
from objcomm.cli.bench_machine import machine
from objcomm.cli.bench_memory import peak_beyond
from objcomm.cli.bench_start import pin
from objcomm.cli.payloads import PAYLOADS, Payload, sent_bytes

RANKS = 4
# What objcomm sets out to reach against torch's call.
GOALS = {
    "broadcast": {"P1": 2.0, "P3": 5.0, "P8": 60.0},
    "all_gather": {"P1": 2.0, "P3": 6.0, "P8": 100.0},
}
TORCH = {
    "broadcast": "broadcast_object_list",
    "all_gather": "all_gather_object",
    "gather": "gather_object",
    "scatter": "scatter_object_list",
    "all_to_all": "",
}
Method = Callable[[], Any]


def methods(call: str, obj: Any, nbytes: int) -> dict[str, Method]:
    """What is compared, by name; ``obj`` is every rank's own, equal object."""
    rank = dist.get_rank()
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    many = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(RANKS)]

    def torch_broadcast() -> Any:
        box = [obj if rank == 0 else None]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def torch_all_gather() -> Any:
        box = [None] * RANKS
        dist.all_gather_object(box, obj)
        return box

    def torch_gather() -> Any:
        box = [None] * RANKS if rank == 0 else None
        dist.gather_object(obj, box, 0)
        return box

    def torch_scatter() -> Any:
        box = [None]
        dist.scatter_object_list(box, [obj] * RANKS if rank == 0 else None, 0)
        return box[0]

    ours: dict[str, Method] = {
        "broadcast": lambda: objcomm.broadcast_object(obj if rank == 0 else None, 0),
        "all_gather": lambda: objcomm.all_gather_objects(obj),
        "gather": lambda: objcomm.gather_objects(obj, 0),
        "scatter": lambda: objcomm.scatter_objects([obj] * RANKS if rank == 0 else None, 0),
        "all_to_all": lambda: objcomm.all_to_all_objects([obj] * RANKS),
    }
    theirs: dict[str, Method] = {
        "broadcast": torch_broadcast,
        "all_gather": torch_all_gather,
        "gather": torch_gather,
        "scatter": torch_scatter,
    }
    raw: dict[str, Method] = {
        "broadcast": lambda: dist.broadcast(memory, 0),
        "all_gather": lambda: dist.all_gather(many, memory),
        "gather": lambda: dist.gather(memory, many if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(memory, many if rank == 0 else None, 0),
    }
    found = {"objcomm": ours[call]}
    if call in theirs:
        found["torch"] = theirs[call]
        found["raw bytes"] = raw[call]
    return found


def seconds_of(method: Method, repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        method()
    dist.barrier()
    return (time.perf_counter() - start) / repeats


def agree_on(value: int) -> int:
    """``value`` of rank 0, on all ranks."""
    box = torch.tensor([value])
    dist.broadcast(box, 0)
    return int(box)


def measure(call: str, payload: Payload, rounds: int, budget: float) -> dict[str, float]:
    obj = payload.make()
    chosen = methods(call, obj, sent_bytes(obj))
    repeats = {}
    for name, method in chosen.items():
        seconds_of(method, 2)
        slice_seconds = budget / rounds / len(chosen)
        repeats[name] = agree_on(max(1, min(200, int(slice_seconds / seconds_of(method, 2)))))
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, method in chosen.items():
            times[name].append(seconds_of(method, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def count(call: str, payload: Payload) -> tuple[int, int]:
    """Messages and bytes that all ranks together sent for one call."""
    method = methods(call, payload.make(), 0)["objcomm"]
    before = objcomm.stats()
    method()
    after = objcomm.stats()
    both = torch.tensor([after[name] - before[name] for name in ("messages_sent", "bytes_sent")])
    dist.all_reduce(both)
    return int(both[0]), int(both[1])


def measure_memory(payload: Payload) -> int:
    """Bytes above its own object that a gather takes on the rank next to its destination."""
    method = methods("gather", payload.make(), 0)["objcomm"]
    method()
    dist.barrier()
    rise = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 1:
        rise[0] = peak_beyond(method)[0]
    else:
        method()
    dist.broadcast(rise, 1)
    return int(rise)


def worker(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.pinned:
        pin(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    rows = []
    for call in options.calls:
        for payload in PAYLOADS:
            if payload.name not in options.payloads:
                continue
            row: dict[str, Any] = {"call": call, "payload": payload.name, "bytes": sent_bytes(payload.make())}
            row["seconds"] = measure(call, payload, options.rounds, options.seconds)
            row["messages"], row["bytes_sent"] = count(call, payload)
            if call == "gather" and sys.platform == "linux":
                row["memory"] = measure_memory(payload)
            rows.append(row)
            if rank == 0:
                show(row)
    if rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "ranks": RANKS, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    seconds, call = row["seconds"], row["call"]
    line = f"{call:<11} {row['payload']}  objcomm {seconds['objcomm'] * 1e6:>9.0f} us"
    if "torch" in seconds:
        ratio = seconds["torch"] / seconds["objcomm"]
        goal = GOALS.get(call, {}).get(row["payload"])
        verdict = "" if goal is None else f"goal {goal:5.1f} {'reached' if ratio >= goal else 'MISSED'}"
        line += f"  {TORCH[call]} {seconds['torch'] * 1e6:>9.0f} us  raw bytes {seconds['raw bytes'] * 1e6:>8.0f} us"
        line += f"  x{ratio:<6.1f} {verdict:<19}"
    line += f"  messages {row['messages']}"
    if "memory" in row:
        line += f"  memory +{row['memory'] / 2**20:.1f} MiB"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", nargs="*", default=["broadcast", "all_gather"], choices=list(TORCH), metavar="CALL")
    parser.add_argument("--payloads", nargs="*", default=["P1", "P3", "P8"], metavar="P", help="some of P1 to P8")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which the methods take turns")
    parser.add_argument("--seconds", type=float, default=12.0, help="about how long a call and payload may take")
    parser.add_argument("--pinned", action="store_true", help="give each rank a core, in turns")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    print(f"medians of one call, {RANKS} ranks over gloo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(worker, (store.port, options), RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
