"""Rank 0 reads the configuration and makes the model; every other rank gets both in one object.

torchrun --nproc-per-node 2 examples/broadcast_config.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist

import objcomm


@dataclass(frozen=True)
class Config:
    width: int
    rate: float
    stages: tuple[str, ...] = ("embed", "head")
    extra: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    setup: Any = None
    if rank == 0:
        torch.manual_seed(7)
        config = Config(width=8, rate=1e-3, extra={"seed": 7})
        setup = {"config": config, "model": torch.nn.Linear(config.width, 1), "vocabulary": {"the": 0, "a": 1}}
    setup = objcomm.broadcast_object(setup, src=0)
    assert setup["config"] == Config(width=8, rate=1e-3, extra={"seed": 7})
    answer = setup["model"](torch.ones(setup["config"].width))
    # The same weights everywhere: every rank computes the same.
    first: Any = objcomm.broadcast_object(answer.detach(), src=0)
    assert torch.equal(first, answer)
    print(f"rank {rank}: {setup['config']}, the model says {answer.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
