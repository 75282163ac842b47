"""``python -m objcomm doctor``: whether objcomm works here, and how; under torchrun, in the job's own ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import objcomm

from . import examine, facts, launch
from .demo import seconds
from .facts import Check

_POLL_SECONDS = 0.01
_LEAVE_SECONDS = 5.0
_WIDTH = 118


def add_to(commands: Any) -> None:
    """Add this command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check versions, settings and transports, and send objects between all ranks",
        description="Check versions, settings and transports, and send objects between all ranks. Under torchrun it "
        "looks at the ranks that torchrun started, and rank 0 prints one table; else it starts two of its own. "
        "The exit code is 0 if all is well.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--backend",
        help="what torch.distributed is initialised with (default: gloo, with the accelerator's own beside)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="SECONDS", help="of every step (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check as ``options`` say. Returns 0 if all is well, else 1: on every rank the same."""
    if launch.world_size() is None:
        arguments = ["doctor", "--timeout", str(options.timeout)]
        arguments += ["--json"] if options.json else []
        arguments += ["--backend", options.backend] if options.backend else []
        return launch.start_ranks(arguments)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = _device()
    try:
        backend = options.backend or _backend(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        print(f"rank {rank}: the ranks did not come together within {options.timeout:g} s: {reason}", file=sys.stderr)
        return 1
    try:
        return _examine(rank, dist.get_world_size(), device, options)
    except (RuntimeError, objcomm.ObjcommError) as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


def _device() -> str | None:
    """This rank's accelerator, where every rank of this host has one of its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < on_this_host:
        return None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    torch.accelerator.set_device_index(local)
    return f"{kind.type}:{local}"


def _backend(device: str | None) -> str:
    if device is None:
        return "gloo"
    kind = device.partition(":")[0]
    own = dist.get_default_backend_for_device(kind)
    return "gloo" if own == "gloo" else f"cpu:gloo,{kind}:{own}"


def _examine(rank: int, size: int, device: str | None, options: argparse.Namespace) -> int:
    """Tell rank 0 through the store, which works even where nothing else does, and hear what it makes of it."""
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore("objcomm/doctor", c10d._get_process_group_store(group))
    store.set(f"facts/{rank}", json.dumps(facts.of_this_rank(rank)))
    told = _read(store, "facts", size, options.timeout) if rank == 0 else {}
    tried: list[dict[str, Any]] = []
    try:
        tried = examine.pairs(rank, size, device, options.timeout)
    except objcomm.UsageError as error:  # a setting that cannot be read: the facts tell
        tried = [
            {"src": None, "dst": rank, "way": None, "microseconds": None, "mib_per_second": None, "error": str(error)}
        ]
    store.set(f"pairs/{rank}", json.dumps(tried))
    if rank != 0:
        # Rank 0 may have to wait for others that never come.
        store.wait(["verdict"], timedelta(seconds=3 * options.timeout + 5))
        verdict = int(store.get("verdict"))
        store.add("heard", 1)
        return verdict
    # Those that are there wait for nobody longer than for the time-out.
    pairs = _read(store, "pairs", size, 2 * options.timeout)
    missing = sorted(set(range(size)) - set(told) | set(range(size)) - set(pairs))
    checks = facts.judge([told[one] for one in sorted(told)], missing, facts.nnscaler())
    # A rank that could not even begin has one row, without a sender.
    rows = sorted((row for each in pairs.values() for row in each), key=lambda row: (row["src"] or 0, row["dst"]))
    failed = any(check.verdict == "FAIL" for check in checks) or any(row["error"] for row in rows)
    if options.json:
        report = {
            "ok": not failed,
            "checks": [check._asdict() for check in checks],
            "ranks": [told[one] for one in sorted(told)],
            "pairs": rows,
        }
        print(json.dumps(report, indent=2))
    else:
        print(table(checks, list(told.values()), rows, ok=not failed), flush=True)
    store.set("verdict", str(int(failed)))
    _leave_last(store, size)
    return int(failed)


def _read(store: dist.Store, what: str, size: int, timeout: float) -> dict[int, Any]:
    """What every rank has told, by rank, without those that have not in time."""
    deadline = time.monotonic() + timeout
    found: dict[int, Any] = {}
    while len(found) < size and time.monotonic() < deadline:
        for rank in set(range(size)) - set(found):
            if store.check([f"{what}/{rank}"]):
                found[rank] = json.loads(store.get(f"{what}/{rank}"))
        time.sleep(_POLL_SECONDS)
    return found


def _leave_last(store: dist.Store, size: int) -> None:
    """The store may live in this process, and the others must still read the verdict."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while store.add("heard", 0) < size - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def table(
    checks: Sequence[Check], ranks: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], *, ok: bool
) -> str:
    """All of it for a person."""
    hosts = {one["host"] for one in ranks}
    count = f"{len(ranks)} rank{'s' * (len(ranks) != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
    lines = [f"objcomm doctor: {count}", ""]
    for check in checks:
        lines += _wrapped(f"{check.verdict:5} {check.name:16} ", check.text)
    if rows:
        lines += ["", f"{'':5} {'from':>5} {'to':>5} {'small object':>14} {'16 MiB tensor':>16}   transport"]
    for row in rows:
        small = "-" if row["microseconds"] is None else f"{row['microseconds']:,.0f} us"
        large = "-" if row["mib_per_second"] is None else f"{row['mib_per_second']:,.0f} MiB/s"
        start = f"{'FAIL' if row['error'] else 'ok':5} {row['src']!s:>5} {row['dst']:>5} {small:>14} {large:>16}   "
        lines += _wrapped(start, row["way"] or "-")
        if row["error"]:
            lines += _wrapped(f"{'':5} ", row["error"])
    lines += ["", "All is well." if ok else "Not all is well: see the lines that begin with FAIL."]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start)) or [start]
