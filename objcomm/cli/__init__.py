"""The command line: ``python -m objcomm demo`` and its siblings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import cast

from . import bench, demo, doctor, tracing


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    >>> main(["demo", "--steps", "0"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    parser = argparse.ArgumentParser(
        prog="python -m objcomm", description="Objects of unknown size between the ranks of a PyTorch job."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (demo, bench, doctor, tracing):
        command.add_to(commands)
    options = parser.parse_args(argv)
    return cast(int, options.run(options))
