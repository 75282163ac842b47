"""The example script, as a reader runs it."""

from __future__ import annotations

import os
import subprocess
import sys

from .pool import ROOT


def test_nested_dict(version: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "nnscaler_nested_dict.py")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "objcomm.move_object(getitem" in done.stdout
    assert "inference: as in one process" in done.stdout
