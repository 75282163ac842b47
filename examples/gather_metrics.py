"""Every rank has metrics of its own, with keys that only it knows; rank 0 brings them together.

torchrun --nproc-per-node 2 examples/gather_metrics.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist

import objcomm


def metrics(rank: int) -> dict[str, Any]:
    losses = torch.tensor([1.0 / (step + rank + 1) for step in range(3 + rank)])
    return {"losses": losses, "per_class": {f"class {rank}": 0.5 + rank / 10}, "slowest": ("decode", 12.5 * rank)}


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        # All receives are posted at once: the ranks may come in any order.
        arriving = [objcomm.irecv_object(src, channel="metrics") for src in range(1, size)]
        everything = [metrics(0), *(work.wait() for work in arriving)]
        losses = torch.cat([one["losses"] for one in everything])
        classes = {name: value for one in everything for name, value in one["per_class"].items()}
        slowest = max((one["slowest"] for one in everything), key=lambda slow: slow[1])
        assert len(losses) == sum(3 + one for one in range(size))
        assert sorted(classes) == sorted(f"class {one}" for one in range(size))
        print(f"{len(losses)} losses, mean {losses.mean():.4f}; {classes}; slowest: {slowest[0]} {slowest[1]} ms")
    else:
        objcomm.send_object(metrics(rank), 0, channel="metrics")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
