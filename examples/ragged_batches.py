"""Batches whose number of samples, lengths and even keys differ, filled into one buffer where they fit.

torchrun --nproc-per-node 2 examples/ragged_batches.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist

import objcomm

SIZES = [[4, 1, 7], [], [2] * 5, [100_000, 3]]


def ragged(number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"samples": [torch.full((size,), float(number)) for size in SIZES[number]]}
    if number == 2:
        made["labels"] = torch.arange(len(SIZES[number]))
    return made


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        for number in range(len(SIZES)):
            objcomm.send_object(ragged(number), dst=1)
        # What always has one shape can be received into memory that is there already.
        objcomm.send_object({"weights": torch.ones(256, 256)}, dst=1)
    else:
        for number, sizes in enumerate(SIZES):
            batch = objcomm.recv_object(src=0)
            assert [len(sample) for sample in batch["samples"]] == sizes
            assert all(bool((sample == number).all()) for sample in batch["samples"])
            print(f"batch {number}: {sizes}, keys {sorted(batch)}")
        mine = {"weights": torch.zeros(256, 256)}
        got = objcomm.recv_object(src=0, into=mine)
        assert got["weights"] is mine["weights"]
        print(f"weights filled in place: {mine['weights'].sum():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
