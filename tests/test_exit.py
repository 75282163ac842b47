"""Processes that end with something in flight: none aborts, and what was sent arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAM = """
import sys, threading, time
import torch, torch.distributed as dist
import objcomm

rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if how.startswith("dropped"):
    size = 3 if how.endswith("small") else 5_000_000
    if rank == 0:
        objcomm.isend_object({"x": torch.arange(size)}, 1)
    else:
        time.sleep(0.3)
        assert torch.equal(objcomm.recv_object(0)["x"], torch.arange(size))
elif how == "pending":
    if rank == 0:
        work = objcomm.irecv_object(1)
    else:
        time.sleep(1)
elif how == "thread":
    if rank == 0:
        threading.Thread(target=lambda: objcomm.recv_object(1), daemon=True).start()
        time.sleep(0.3)
    else:
        time.sleep(1)
if how != "thread":
    dist.destroy_process_group()
print("end")
"""


@pytest.mark.parametrize("how", ["dropped small", "dropped large", "pending", "thread"])
def test_a_process_ends_well_with_something_in_flight(how: str, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(store.port), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all("end" in output for output in outputs)
