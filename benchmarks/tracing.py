"""What tracing costs while it is off: the same functions with and without their looks at the recorder, in turns.

Run it with ``python -m benchmarks.tracing``. Both ranks swap the code of objcomm's functions for one that was compiled
without the looks, and back, every hundred round trips: so the two meet the same noise. A time is half of a round trip.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import statistics
import time
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import objcomm
from objcomm.cli.bench_start import pin

MODULES = ("incoming", "outgoing", "segments")
LOOK = "timeline.active is not None or profiler._is_profiler_enabled"
TURNS = 100


class _Without(ast.NodeTransformer):
    """Every look is answered in advance."""

    def __init__(self) -> None:
        self.found = 0

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if ast.unparse(node.test) == LOOK:
            self.found += 1
            return node.orelse
        return self.generic_visit(node)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            if isinstance(member, FunctionType) and member.__module__ == module.__name__:
                yield member


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _name(code: CodeType) -> str:
    # Qualified from Python 3.11 on.
    return str(getattr(code, "co_qualname", code.co_name))


def variants() -> list[tuple[FunctionType, CodeType, CodeType]]:
    """Each function that looks, with its code as it is and without the look."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"objcomm.{name}")
        with open(str(module.__file__)) as file:
            tree = ast.parse(file.read())
        without = _Without()
        tree = without.visit(tree)
        assert without.found, f"nothing looks in {name}"
        compiled = {_name(code): code for code in _codes(compile(tree, str(module.__file__), "exec"))}
        for function in _functions(module):
            other = compiled.get(_name(function.__code__))
            if other is not None and other.co_code != function.__code__.co_code:
                found.append((function, function.__code__, other))
    return found


def _times(rank: int, obj: Any, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        if rank == 0:
            objcomm.send_object(obj, 1)
            objcomm.recv_object(1)
        else:
            objcomm.send_object(objcomm.recv_object(0), 0)
        times.append((time.perf_counter() - start) / 2)
    return times


def work(rank: int, port: int, rounds: int, pinned: bool) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if pinned:
        pin(rank)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, 2, rank == 0), rank=rank, world_size=2)
    obj = {"step": 7, "name": "batch", "mask": None, "lengths": [3, 1, 4]}
    swapped = variants()
    _times(rank, obj, 500)
    as_it_is: list[float] = []
    without: list[float] = []
    ratios = []
    for _ in range(rounds):
        medians = []
        for chosen, into in ((1, as_it_is), (2, without)):
            for entry in swapped:
                entry[0].__code__ = entry[chosen]  # type: ignore[assignment]
            times = _times(rank, obj, TURNS)
            into += times
            medians.append(statistics.median(times))
        ratios.append(medians[0] / medians[1])
    for function, code, _ in swapped:
        function.__code__ = code
    if rank == 0:
        print(
            f"{len(swapped)} functions look; {rounds} rounds of {TURNS} round trips each way, one way of a small dict:"
        )
        print(f"as it is      median {statistics.median(as_it_is) * 1e6:7.1f} us")
        print(f"without       median {statistics.median(without) * 1e6:7.1f} us")
        low, _, high = statistics.quantiles(ratios, n=4)
        print(f"ratio         median {statistics.median(ratios):.4f}, half of the rounds in {low:.3f} to {high:.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--unpinned", action="store_true", help="cores as the scheduler likes")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(work, (port, options.rounds, not options.unpinned), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
