"""The output that docs/debugging.md shows is what is printed, but for times, numbers of processes and places."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

import objcomm
from tests.ranks import run_ranks

TEXT = (Path(__file__).parent.parent / "docs" / "debugging.md").read_text()
REPORT, ERROR = re.findall(r"^```text\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def _bare(text: str) -> str:
    for pattern, instead in (
        (r"\n(?:  \|)? {6,}", " "),  # a long line that was folded
        (r"\d\d:\d\d:\d\d", "TIME"),
        (r"process \d+", "process N"),
        (r"for [\d.]+ s of [\d.]+ s", "for SECONDS"),
        (r"at \S+:\d+ in \w+", "at LINE"),
    ):
        text = re.sub(pattern, instead, text)
    return text.strip()


def test_the_report() -> None:
    def body(rank: int) -> str:
        objcomm.debug()  # ranks tell all the time what they do
        if rank == 1:
            objcomm.recv_object(0, channel="first")
            objcomm.recv_object(0, channel="batch", timeout=60)
            objcomm.send_object(None, 0, channel="grads")
            return ""
        told: list[str] = []

        def ask() -> None:
            while "for message 1 from rank 0" not in objcomm.report():
                time.sleep(0.1)
            told.append(objcomm.report())
            objcomm.send_object(None, 1, channel="batch")

        objcomm.send_object({"x": [1]}, 1, channel="first")
        threading.Timer(0.1, ask).start()
        objcomm.recv_object(1, channel="grads", timeout=60)
        return told[0]

    shown = REPORT.removeprefix("$ kill -USR1 PID\n")
    assert _bare(run_ranks(body, 2)[0]) == _bare(shown)


def test_the_error_of_debug_mode() -> None:
    def body(rank: int) -> str:
        objcomm.debug()
        with pytest.raises(objcomm.ProtocolError) as caught:
            if rank == 0:
                objcomm.broadcast_object(1, src=0)
            elif rank == 1:
                objcomm.gather_objects(1, dst=0)
            else:
                objcomm.broadcast_object(None, src=0)
        return f"ProtocolError: {caught.value}"

    assert _bare(run_ranks(body, 3)[1]) == _bare(ERROR)
