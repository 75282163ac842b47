"""One run of the benchmark on one of its ranks: rank 0 tells the user and writes what is to be written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import bench_aims, bench_plot, bench_start, bench_sweep, bench_table, examine
from .bench_machine import in_a_line, machine
from .bench_methods import METHODS, Bench
from .bench_rounds import Row
from .bench_rounds import measure as measure_payload
from .bench_start import Ranks
from .payloads import Payload
from .progress import Progress

FORMAT = 1


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures belong to; to be asked for before the ranks are given cores of their own."""
    return {
        "format": FORMAT,
        "unit": "seconds",
        "machine": machine(),
        "options": {name: getattr(options, name) for name in ("rounds", "seconds", "pinned", "timeout")},
    }


class Screen:
    """What the user sees of rank 0: a bar on a terminal, and lines, unless the figures are printed in their place."""

    def __init__(self, rank: int, options: argparse.Namespace, steps: int) -> None:
        self._rounds: int = options.rounds
        self._silent = rank != 0
        self._lines = rank == 0 and options.json != "-"
        stream = sys.stdout if options.json != "-" else sys.stderr
        self._bar = Progress(steps * self._rounds, stream, live=rank == 0 and (stream.isatty() or bench_start.live()))
        self._step = -1
        self._name = ""

    def next(self, name: str) -> None:
        """The next payload or size begins."""
        self._step += 1
        self._name = name

    def report(self, done: int, what: str) -> None:
        if not self._silent:
            word = METHODS[what][0] if what in METHODS else what
            self._bar.show(self._step * self._rounds + done, f"{self._name}: {word}")

    def line(self, text: str) -> None:
        if self._lines:
            self._bar.line(text)

    def block(self, text: str) -> None:
        """Lines that stand apart from those above; none is no block."""
        if text:
            self.line(f"\n{text}")

    def close(self) -> None:
        if not self._silent:
            self._bar.close()


def measure(ranks: Ranks, payloads: Sequence[Payload], options: argparse.Namespace, found: dict[str, Any]) -> int:
    """Measure ``payloads``, and the sweeps if they are wanted. Returns the status, on both ranks the same.

    Raises:
        objcomm.ObjcommError, RuntimeError: the other rank is gone, or does not answer.
        OSError: something cannot be written.
    """
    bench = Bench(ranks, options.methods, options.timeout)
    wanted = bench_sweep.sweeps(options.largest) if options.sweep or options.plot else []
    steps = len(payloads) + sum(len(sweep.sizes) for sweep in wanted)
    screen = Screen(bench.rank, options, steps)
    found["machine"]["way"] = examine.way(bench.peer)
    found["started_by"] = ranks.started_by
    found["one_host"] = bench.one_host
    found["methods"] = {name: METHODS[name][1] for name in bench.names}
    found["left_out"] = bench.left_out
    where = "one host" if bench.one_host else "two hosts"
    screen.line(f"objcomm bench: two ranks of {where}, started by {ranks.started_by}; {in_a_line(found['machine'])}")
    screen.line(f"objcomm's way: {found['machine']['way']}")
    screen.line(f"One way, medians of up to {options.rounds} rounds in which the methods take turns.")
    try:
        found["payloads"] = _payloads(bench, payloads, options, screen)
        found["sweeps"] = {sweep.name: _sweep(bench, sweep, options, screen) for sweep in wanted}
        judged = [name for name in ("objcomm", "gloo") if name in bench.names]
        growths = [one for sweep in wanted for one in bench_sweep.growths(sweep, found["sweeps"][sweep.name], judged)]
        found["growth"] = [one._asdict() for one in growths]
    finally:
        screen.close()
    if growths:
        screen.block("\n".join([bench_table.GROWTH, *map(bench_table.growth, growths)]))
    rows = found["payloads"] + [row for sweep in found["sweeps"].values() for row in sweep]
    screen.block(bench_table.notes(found["payloads"], bench.left_out))
    failed = any(row["error"] is not None for row in rows)
    if options.check:
        verdicts = bench_aims.judge(found["payloads"])
        found["aims"] = [one._asdict() for one in verdicts]
        screen.block(bench_table.aims(verdicts))
        failed = failed or any(one.reached is False for one in verdicts) or not all(one.fine for one in growths)
    if bench.rank == 0 and not _write(found, options):
        failed = True
    return bench.tell(int(failed))


def _payloads(bench: Bench, payloads: Sequence[Payload], options: argparse.Namespace, screen: Screen) -> list[Row]:
    rows: list[Row] = []
    if not payloads:
        return rows
    screen.block(bench_table.heading("payload", bench.names))
    for payload in payloads:
        screen.next(payload.name)
        row = measure_payload(bench, payload, bench.names, options.rounds, options.seconds, screen.report, extras=True)
        rows.append(row)
        screen.line(bench_table.line(row, bench.names))
    screen.block(bench_table.ratios([row for row in rows if row["error"] is None], bench.names))
    return rows


def _sweep(bench: Bench, sweep: bench_sweep.Sweep, options: argparse.Namespace, screen: Screen) -> list[Row]:
    names = [name for name in bench.names if name in sweep.methods]
    screen.block(bench_table.heading(sweep.title, names))
    rows: list[Row] = []
    for place, size in enumerate(sweep.sizes):
        payload = sweep.payload(size)
        screen.next(f"{sweep.title}, {payload.name}")
        before = rows[-1] if rows else None
        factor = size / sweep.sizes[place - 1]
        going = bench.agree(bench_sweep.patient(names, before, factor, options.seconds))
        row = measure_payload(bench, payload, going, options.rounds, options.seconds, screen.report, extras=False)
        row["size"] = size
        earlier = before["left_out"] if before is not None else {}
        late = {name: earlier.get(name, "it would take too long") for name in names if name not in going}
        row["left_out"].update(late)
        rows.append(row)
        screen.line(bench_table.line(row, names))
        if row["error"] is not None:
            break
    return rows


def _write(found: dict[str, Any], options: argparse.Namespace) -> bool:
    try:
        if options.json == "-":
            print(json.dumps(found, indent=1), flush=True)
        elif options.json is not None:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
        if options.plot is not None:
            bench_plot.draw(found, options.plot)
    except (OSError, bench_plot.PlotError) as error:
        print(error, file=sys.stderr)
        return False
    return True
