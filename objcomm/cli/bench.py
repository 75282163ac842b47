"""``python -m objcomm bench``: how fast objects go from one rank to another, by objcomm and by others."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import objcomm

from . import bench_plot, bench_run, bench_start, launch
from .bench_file import PayloadError, chosen
from .bench_methods import METHODS, told
from .bench_sweep import SMALLEST
from .demo import seconds
from .payloads import Payload

_MOST_ROUNDS = 10_000
_LARGEST = 1 << 40
_UNITS = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30}


def add_to(commands: Any) -> None:
    """Add this command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure how fast objects go between two ranks, beside torch's own call and others",
        description="Measure how fast objects go from one rank to another and back: by objcomm, by "
        "send_object_list, by mpi4py where it is installed, and as many raw bytes, in turns within one run. Times are "
        "those of one way, medians of all rounds. It starts its two ranks itself; under torchrun or mpiexec it uses "
        "theirs.",
    )
    parser.add_argument(
        "--payload",
        nargs="+",
        default=[],
        metavar="P|FILE.py",
        help="P1 to P8, or all that a file has (default: P1 to P8)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)} (default: all)",
    )
    parser.add_argument(
        "--rounds", type=rounds, default=11, help="in which the methods take turns (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=5.0,
        help="about how long one payload may take, rounds are left out beyond it (default: %(default)g)",
    )
    parser.add_argument("--pinned", action="store_true", help="give each rank a core of its own")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="measure cost against size in place of the payloads: 1 KiB to --largest, and 1 to 10,000 tensors",
    )
    parser.add_argument(
        "--largest", type=size, default="256MiB", metavar="SIZE", help="of the sweep (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the sweep: .png, .svg, .pdf; needs matplotlib")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write all figures there, or to the terminal in place of the tables",
    )
    parser.add_argument(
        "--check", action="store_true", help="say which of objcomm's aims are reached, and fail if one is not"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="SECONDS", help="of every transfer (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def rounds(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MOST_ROUNDS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {_MOST_ROUNDS:,}")
    return number


def size(text: str) -> int:
    """Bytes, in words of people.

    >>> size("1GiB"), size("64 M"), size("2000")
    (1073741824, 67108864, 2000)
    """
    found = re.fullmatch(r"(\d+) ?([KMG]?)(?:i?B)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64MiB")
    number = int(found.group(1)) << _UNITS[found.group(2)]
    if not SMALLEST <= number <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not between 1KiB and 1024GiB")
    return number


def run(options: argparse.Namespace) -> int:
    """Measure as ``options`` say. Returns 0, 1 where something failed or an aim was missed, or 2 where the options
    cannot be followed: on every rank the same."""
    try:
        # A sweep comes in the place of the payloads that nobody has named.
        payloads = [] if _sweeps(options) and not options.payload else chosen(options.payload)
        _check_outputs(options)
    except (PayloadError, bench_plot.PlotError) as error:
        print(error, file=sys.stderr)
        return 2
    if not bench_start.is_rank():
        stream = sys.stderr if options.json == "-" else sys.stdout
        mpi = any(name.startswith("mpi4py") for name in options.methods)
        return bench_start.start(arguments(options), mpi=mpi, terminal=stream.isatty())
    size = bench_start.world_size()
    if size != launch.RANKS:
        print(f"the benchmark takes {launch.RANKS} ranks, and {size} were started", file=sys.stderr)
        return 2
    return _measure(payloads, options)


def _sweeps(options: argparse.Namespace) -> bool:
    return bool(options.sweep or options.plot)


def _check_outputs(options: argparse.Namespace) -> None:
    """Nobody wants to learn after minutes that the figures cannot be written."""
    if options.plot is not None:
        bench_plot.check(options.plot)
    for path in (options.plot, options.json):
        if path not in (None, "-") and not Path(path).resolve().parent.is_dir():
            raise PayloadError(f"{path} cannot be written: there is no such folder")


def _measure(payloads: list[Payload], options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    rank = bench_start.rank()
    facts = bench_run.facts(options)
    if options.pinned:
        bench_start.pin(rank)
    objcomm.configure(timeout=options.timeout)
    try:
        ranks = bench_start.join(options.timeout)
    except RuntimeError as error:
        print(f"rank {rank}: the ranks did not come together: {told(error)}", file=sys.stderr)
        return 1
    try:
        status = bench_run.measure(ranks, payloads, options, facts)
        ranks.leave()
    except Exception as error:
        # Before the connections close: the other rank may then end, and whoever started both end this one.
        if isinstance(error, (objcomm.ObjcommError, RuntimeError, OSError)):
            print(f"rank {rank}: {told(error)}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        ranks.fail()
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        dist.destroy_process_group()
    return status


def arguments(options: argparse.Namespace) -> list[str]:
    """The command line that ``options`` came from."""
    found = ["bench", "--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    found += ["--timeout", str(options.timeout), "--largest", str(options.largest), "--methods", *options.methods]
    found += ["--payload", *options.payload] if options.payload else []
    found += [f"--{name}" for name in ("pinned", "sweep", "check") if getattr(options, name)]
    found += [f"--plot={options.plot}"] if options.plot else []
    found += [f"--json={options.json}"] if options.json else []
    return found
