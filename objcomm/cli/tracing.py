"""``python -m objcomm trace merge`` and ``trace plot``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import tracing_merge, tracing_plot


def add_to(commands: Any) -> None:
    """Add this command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="join the traces of all ranks, or draw them",
        description="Join or draw what ranks have written that ran with OBJCOMM_TRACE=FOLDER or objcomm.trace(FOLDER).",
    )
    parts = parser.add_subparsers(title="what to do", required=True, metavar="merge | plot")
    merging = parts.add_parser("merge", help="write one file for Perfetto (https://ui.perfetto.dev), clocks aligned")
    _source(merging, "a folder with the ranks' files")
    merging.add_argument("-o", "--output", type=Path, help="the file to write (default: trace.json in the folder)")
    merging.set_defaults(run=_merge)
    plotting = parts.add_parser("plot", help="draw the timeline of all ranks; needs matplotlib")
    plotting.add_argument("picture", type=Path, help="the picture to write: .png, .svg, .pdf")
    _source(plotting, "a folder with the ranks' files, or a merged file")
    plotting.add_argument("--begin", type=float, metavar="MS", help="milliseconds from the start of the trace")
    plotting.add_argument("--end", type=float, metavar="MS", help="milliseconds from the start of the trace")
    plotting.set_defaults(run=_plot)


def _source(parser: argparse.ArgumentParser, what: str) -> None:
    default = Path(os.environ.get("OBJCOMM_TRACE") or ".")
    parser.add_argument(
        "source", nargs="?", type=Path, default=default, help=f"{what} (default: $OBJCOMM_TRACE, or here)"
    )


def _merge(options: argparse.Namespace) -> int:
    output: Path = options.output or options.source / "trace.json"
    try:
        ranks = tracing_merge.load(options.source)
        merged = tracing_merge.merge(ranks)
        output.write_text(json.dumps(merged, separators=(",", ":")))
    except (OSError, tracing_merge.TraceError) as error:
        return _refuse(error)
    arrows = sum(event["ph"] == "f" for event in merged["traceEvents"])
    clocks = len({rank.clock for rank in ranks})
    print(f"{output}: {len(ranks)} ranks, {clocks} clock{'s' * (clocks > 1)}, {arrows} messages; open it in Perfetto")
    return 0


def _plot(options: argparse.Namespace) -> int:
    source: Path = options.source
    try:
        merged = tracing_merge.merge(tracing_merge.load(source)) if source.is_dir() else _merged(source)
        tracing_plot.draw(merged, options.picture, options.begin, options.end)
    except (OSError, ValueError, tracing_merge.TraceError) as error:
        return _refuse(error)
    print(options.picture)
    return 0


def _merged(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or "traceEvents" not in found:
        raise tracing_merge.TraceError(
            f"{path} is no merged trace: 'trace plot' takes the picture to write first, then a folder with the ranks' "
            "files, or what 'trace merge' wrote"
        )
    return found


def _refuse(error: Exception) -> int:
    print(error, file=sys.stderr)
    return 1
