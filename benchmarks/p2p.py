"""One-way time of objects between two ranks of one host: objcomm, torch's send_object_list, and as many raw bytes.

objcomm is measured as it comes, around the network stack, and over gloo alone.

Run it with ``python -m benchmarks.p2p``; it starts its two ranks itself. The methods take turns within one run, since
only their ratio means anything on a machine that others use; a time is half of a round trip, and the median of all
rounds is shown. Below the table stand the peak memory of a send and of a receive beyond the object itself, and the
messages that one object took.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import objcomm

from .payloads import PAYLOADS, Payload

# What objcomm sets out to reach against send_object_list: around the network stack, and over gloo alone.
GOALS = {
    "objcomm": {"P1": 15.0, "P2": 15.0, "P3": 11.0, "P4": 20.0, "P6": 1.8, "P7": 15.0, "P8": 65.0},
    "over gloo": {"P1": 4.0, "P2": 8.0, "P3": 9.0, "P4": 8.0, "P6": 1.4, "P7": 6.0, "P8": 55.0},
}
MEMORY_GOAL = 16 * (1 << 20)


def send_objcomm(obj: Any) -> None:
    objcomm.send_object(obj, 1 - dist.get_rank())


def receive_objcomm(_: Any) -> Any:
    return objcomm.recv_object(1 - dist.get_rank())


class OverGloo:
    """objcomm in a group whose ranks keep to the network stack."""

    def __init__(self) -> None:
        self.group = dist.new_group([0, 1])
        self.peer = 1 - dist.get_rank()
        objcomm.configure(local_transport=False)
        objcomm.exchange_objects(None, self.peer, group=self.group)
        objcomm.configure(local_transport=True)

    def send(self, obj: Any) -> None:
        objcomm.send_object(obj, self.peer, group=self.group)

    def receive(self, _: Any) -> Any:
        return objcomm.recv_object(self.peer, group=self.group)


def send_torch(obj: Any) -> None:
    dist.send_object_list([obj], 1 - dist.get_rank())


def receive_torch(_: Any) -> Any:
    box = [None]
    dist.recv_object_list(box, 1 - dist.get_rank())
    return box[0]


class RawBytes:
    """The floor: a call of the gloo backend with as many bytes, into memory that was used before."""

    def __init__(self, nbytes: int) -> None:
        group: Any = dist.group.WORLD
        self.backend = group._get_backend(torch.device("cpu"))
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.peer = 1 - dist.get_rank()

    def send(self, _: Any) -> None:
        self.backend.send([self.memory], self.peer, 3).wait()

    def receive(self, _: Any) -> Any:
        self.backend.recv([self.memory], self.peer, 3).wait()


Method = tuple[Callable[[Any], None], Callable[[Any], Any]]


def one_way(method: Method, obj: Any, repeats: int) -> float:
    """Seconds for one way: half of a round trip, the mean of ``repeats`` round trips."""
    send, receive = method
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        if dist.get_rank() == 0:
            send(obj)
            receive(obj)
        else:
            receive(obj)
            send(obj)
    return (time.perf_counter() - start) / repeats / 2


def agree_on(value: int) -> int:
    box = torch.tensor([value])
    dist.broadcast(box, 0)
    return int(box)


def measure(payload: Payload, over_gloo: OverGloo, rounds: int, budget: float) -> dict[str, float]:
    obj = payload.make()
    raw = RawBytes(payload.nbytes)
    methods: dict[str, Method] = {
        "objcomm": (send_objcomm, receive_objcomm),
        "over gloo": (over_gloo.send, over_gloo.receive),
        "send_object_list": (send_torch, receive_torch),
        "raw bytes": (raw.send, raw.receive),
    }
    repeats = {}
    for name, method in methods.items():
        one_way(method, obj, 2)
        slice_seconds = budget / rounds / len(methods)
        repeats[name] = agree_on(max(1, min(200, int(slice_seconds / 2 / one_way(method, obj, 2)))))
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            times[name].append(one_way(method, obj, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_beyond(action: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes by which the resident memory of this process rose above its start while ``action`` ran, at its highest."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    result = action()
    return _status("VmHWM") - before, result


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure_memory(payload: Payload) -> dict[str, int]:
    """Peak memory of one send on rank 0 and one receive on rank 1, beyond what the object itself takes there."""
    obj = payload.make() if dist.get_rank() == 0 else None
    dist.barrier()
    result = torch.zeros(2, dtype=torch.int64)
    if dist.get_rank() == 0:
        result[0], _ = peak_beyond(lambda: send_objcomm(obj))
    else:
        peak, received = peak_beyond(lambda: receive_objcomm(None))
        result[1] = peak - payload.nbytes
        del received
    dist.all_reduce(result)
    return {"send": int(result[0]), "receive": int(result[1])}


def count_messages(payload: Payload) -> int:
    obj = payload.make()
    before = objcomm.stats()["messages_sent"]
    if dist.get_rank() == 0:
        send_objcomm(obj)
    else:
        receive_objcomm(None)
    return objcomm.stats()["messages_sent"] - before


def pin(rank: int) -> None:
    """One core a rank: on a busy machine the scheduler's moves cost more than a small message does."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def worker(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if not options.unpinned:
        pin(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    rows = []
    over_gloo = OverGloo()
    chosen = [payload for payload in PAYLOADS if not options.payloads or payload.name in options.payloads]
    for payload in chosen:
        row: dict[str, Any] = {"payload": payload.name, "title": payload.title, "bytes": payload.nbytes}
        row["seconds"] = measure(payload, over_gloo, options.rounds, options.seconds)
        row["messages"] = count_messages(payload)
        if sys.platform == "linux":
            row["memory"] = measure_memory(payload)
        rows.append(row)
        if rank == 0:
            show(row)
    if rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)
    dist.destroy_process_group()


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "objcomm": objcomm.__version__,
    }


def show(row: dict[str, Any]) -> None:
    seconds = row["seconds"]
    parts = [f"{row['payload']}  {row['title']:<28}"]
    for name in ("objcomm", "over gloo"):
        ratio = seconds["send_object_list"] / seconds[name]
        goal = GOALS[name].get(row["payload"])
        verdict = "" if goal is None else f"{'reached' if ratio >= goal else 'MISSED'} {goal:g}"
        parts.append(f"{name} {seconds[name] * 1e6:>8.0f} us x{ratio:<6.1f} {verdict:<12}")
    parts.append(f"send_object_list {seconds['send_object_list'] * 1e6:>8.0f} us")
    parts.append(f"raw gloo {seconds['raw bytes'] * 1e6:>7.0f} us  messages {row['messages']}")
    memory = row.get("memory")
    if memory:
        parts.append(f"memory +{memory['send'] / 2**20:.1f} / +{memory['receive'] / 2**20:.1f} MiB")
    print("  ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.p2p", description=__doc__.splitlines()[0])
    parser.add_argument("--payloads", nargs="*", metavar="P", help="some of P1 to P8; all by default")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which the methods take turns")
    parser.add_argument("--seconds", type=float, default=12.0, help="about how long a payload may take")
    parser.add_argument("--unpinned", action="store_true", help="leave the ranks' cores to the scheduler")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    print("one-way medians, two ranks of one host; memory: peak of a send / a receive beyond the object itself")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(worker, (store.port, options), 2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
