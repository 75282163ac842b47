"""Processes that end with something in flight, or with a peer that waits, on every transport: none aborts or hangs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.endings import ENDINGS
from tests.faults.jobs import TRANSPORTS


@functools.cache
def endings(transport: str) -> dict[str, list[tuple[int, str, float | None]]]:
    """By ending, of each rank its exit status, what it has printed, and how long its error took."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.endings", transport, str(store.port)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    seen: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return seen


def problems(seen: list[tuple[int, str, float | None]], ending: str) -> list[str]:
    """What was not as it should be."""
    return [
        f"rank {rank} ended with {status}, not {wanted}: {text}"
        for rank, ((status, text, _), (_, wanted)) in enumerate(zip(seen, ENDINGS[ending], strict=True))
        if status != wanted
    ]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_process_ends_well(transport: str, ending: str) -> None:
    assert problems(endings(transport)[ending], ending) == []
