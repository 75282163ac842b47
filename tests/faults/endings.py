"""Processes that end in one way or another, while the other end waits or has something in flight.

``python -m tests.faults.endings TRANSPORT PORT`` lets all of it happen. Every process is a child of this one, which has
imported all and used nothing, and ends as an interpreter does that has reached the end of its program. What became of
them is printed as JSON: by ending, of each rank its exit status, what it has printed, and how long its error took.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import objcomm
from tests.faults.phases import Patches, halfway, payload

LONG = 40.0
TRANSPORT = sys.argv[1] if len(sys.argv) > 1 else ""
# Without a last word it is known once the process is gone, and on a busy machine an interpreter takes its time to end.
BOUND_SECONDS = 30.0 if TRANSPORT == "strict" else 10.0


def _error_of(call: Callable[[], object]) -> str:
    """The error that the peer's end brings, in bounded time."""
    began = time.monotonic()
    try:
        result = call()
    except objcomm.PeerError as error:
        took = time.monotonic() - began
        print(f"error after {took:.3f} s", flush=True)
        assert took < BOUND_SECONDS, took
        return str(error)
    raise AssertionError(f"it came back with {result!r:.100}")


def _send_and_drop(obj: Any) -> None:
    objcomm.isend_object(obj, 1)
    dist.destroy_process_group()


def _take_late(obj: Any) -> None:
    time.sleep(0.3)
    assert torch.equal(objcomm.recv_object(0)["x"], obj["x"])


def _post_and_end() -> None:
    work = objcomm.irecv_object(1)
    dist.destroy_process_group()
    print(work)


def _wait_in_a_thread() -> None:
    threading.Thread(target=lambda: objcomm.recv_object(1), daemon=True).start()
    time.sleep(0.3)


def _raise() -> None:
    objcomm.send_object("alive", 1)
    objcomm.recv_object(1)
    raise ValueError("a broken step")


def _end() -> None:
    objcomm.send_object("alive", 1)
    objcomm.recv_object(1)


def _hear(why: str, call: Callable[[], object]) -> None:
    """Wait for a rank that ends in between two transfers."""
    assert objcomm.recv_object(0) == "alive"
    objcomm.send_object("go", 0)
    text = _error_of(call)
    if TRANSPORT != "strict":  # a backend that demands equal sizes may wait for ever with a last word: there is none
        assert f"rank 0 has left: its process ended{why}" in text, text


def _lose_the_receiver() -> None:
    def send() -> None:
        for _ in range(2):
            objcomm.send_object(payload("segment", 96), 1, timeout=LONG)

    _error_of(send)


def _die_in_the_middle() -> None:
    halfway("recv_segments")(Patches(), lambda: os.kill(os.getpid(), signal.SIGKILL))
    objcomm.recv_object(0, timeout=LONG)
    os.kill(os.getpid(), signal.SIGKILL)


_SMALL, _LARGE = {"x": torch.arange(3)}, {"x": torch.arange(5_000_000)}
# By ending, what each of the two ranks does, and with which status it ends.
ENDINGS: dict[str, tuple[tuple[Callable[[], None], int], tuple[Callable[[], None], int]]] = {
    "a small send whose handle was dropped": ((lambda: _send_and_drop(_SMALL), 0), (lambda: _take_late(_SMALL), 0)),
    "a large send whose handle was dropped": ((lambda: _send_and_drop(_LARGE), 0), (lambda: _take_late(_LARGE), 0)),
    "a receive that is posted": ((_post_and_end, 0), (lambda: time.sleep(0.8), 0)),
    "a thread that waits": ((_wait_in_a_thread, 0), (lambda: time.sleep(0.8), 0)),
    "a rank that raises between two transfers": (
        (_raise, 1),
        (lambda: _hear(" with ValueError: a broken step", lambda: objcomm.recv_object(0, timeout=LONG)), 0),
    ),
    "a rank that ends while its peer waits": (
        (_end, 0),
        (lambda: _hear("", lambda: objcomm.recv_object(0, timeout=LONG)), 0),
    ),
    "a rank that ends while its peer is in a call among all": (
        (_end, 0),
        (lambda: _hear("", lambda: objcomm.all_gather_objects("x", timeout=LONG)), 0),
    ),
    "after a peer that was killed in the middle of a segment": ((_lose_the_receiver, 0), (_die_in_the_middle, -9)),
}


def _play(ending: str, rank: int, port: int) -> None:
    signal.alarm(60)
    torch.set_num_threads(1)
    if TRANSPORT == "strict":
        import tests.strict_backend  # noqa: F401
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group(
        "strict" if TRANSPORT == "strict" else "gloo",
        store=dist.PrefixStore(ending, store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=45),
    )
    ENDINGS[ending][rank][0]()
    print("end", flush=True)


def _seconds(output: str) -> float | None:
    found = [line.split()[2] for line in output.splitlines() if line.startswith("error after ")]
    return float(found[0]) if found else None


def main() -> None:
    """Start two children for each ending, and be the one that tells what became of them."""
    os.environ["OBJCOMM_LOCAL_TRANSPORT"] = "1" if TRANSPORT == "local" else "0"
    children: dict[int, tuple[str, int]] = {}
    folder = tempfile.mkdtemp(prefix="endings-")
    for number, ending in enumerate(ENDINGS):
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                output = os.open(f"{folder}/{number}-{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                _play(ending, rank, int(sys.argv[2]))
                return
            children[pid] = (ending, rank)
    seen: dict[str, list[Any]] = {ending: [None, None] for ending in ENDINGS}
    while children:
        pid, status = os.wait()
        ending, rank = children.pop(pid)
        text = Path(folder, f"{list(ENDINGS).index(ending)}-{rank}").read_text(errors="replace")
        seen[ending][rank] = (os.waitstatus_to_exitcode(status), text, _seconds(text))
    shutil.rmtree(folder)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
