"""The same step with torch's object calls and with objcomm in their place, by turns, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from objcomm import torch_compat


def compare(name: str, step: Callable[[], Any], rounds: int) -> None:
    """Run ``step`` on every rank by turns with and without, see that the results are the same, and print medians."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        results = []
        for installs in (False, True):
            dist.barrier()
            if installs:
                torch_compat.install()
            started = time.perf_counter()
            results.append(step())
            elapsed = time.perf_counter() - started
            torch_compat.uninstall()
            if number:  # the first round makes connections
                seconds[installs].append(elapsed)
        if not same(*results):
            raise SystemExit(f"{name}: the results differ")
    if dist.get_rank() == 0:
        theirs, ours = (statistics.median(seconds[installs]) * 1e3 for installs in (False, True))
        print(f"{name:<44} torch {theirs:9.2f} ms   objcomm {ours:9.2f} ms   {theirs / ours:6.1f} x", flush=True)


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal, tensors by type, shape and value.

    >>> same({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]}), same([torch.ones(2)], [torch.zeros(2)])
    (True, False)
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
