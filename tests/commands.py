"""A command that starts two ranks, one of which is killed: it ends soon, badly, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def loses_a_rank(command: Sequence[str], env: Mapping[str, str], output: Path, *, shows: str, after: float = 0) -> str:
    """Run a command, kill its second rank ``after`` seconds once it has printed ``shows``; returns all that it prints.

    ``output`` is a file for that.
    """
    with output.open("w") as sink:
        parent = subprocess.Popen(command, cwd=ROOT, env=env, stdout=sink, stderr=sink)
    try:
        end = time.monotonic() + 60
        while shows not in output.read_text() and time.monotonic() < end and parent.poll() is None:
            time.sleep(0.05)
        ranks = _children(parent.pid)
        assert len(ranks) == 2, output.read_text()
        time.sleep(after)
        os.kill(ranks[1], signal.SIGKILL)
        assert parent.wait(30) not in (0, None)
    finally:
        parent.kill()
        parent.wait()
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
    return output.read_text()


def _children(pid: int) -> list[int]:
    """In the order in which they were started."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
