"""Two ranks for a command: those that torchrun started, or two processes of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

RANKS = 2
# After one rank has ended badly, the other has this long to notice by itself.
_GRACE = 5.0


def world_size() -> int | None:
    """How many ranks torchrun, or :func:`start_ranks`, has started; ``None`` outside of both."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size is not None and "RANK" in os.environ else None


def start_ranks(arguments: Sequence[str]) -> int:
    """Run ``python -m objcomm ARGUMENTS`` in two processes, with the environment that torchrun would give
    them.

    Returns the status of one that failed, or 0. Neither outlives this call.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "objcomm", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            ranks.append(subprocess.Popen(command, env=_environment(rank, store.port)))
        return _wait(ranks)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def _environment(rank: int, port: int) -> dict[str, str]:
    env = dict(os.environ)
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    while True:
        statuses = [process.poll() for process in ranks]
        failed = [status for status in statuses if status]
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE
        if None not in statuses or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(0.05)
    first = failed[0] if failed else 0
    return first if first >= 0 else 128 - first


def join(timeout: float) -> int:
    """Make this process a rank of a gloo group whose time-out is ``timeout`` seconds, and return its
    number."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return dist.get_rank()
