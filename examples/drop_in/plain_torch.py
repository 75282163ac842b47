"""Programs that use torch.distributed's own object calls, with and without objcomm in their place.

    torchrun --nproc-per-node 2 examples/drop_in/plain_torch.py

What it does: hands a state dict from one rank to all, gathers what a detector finds in each image, scatters the work,
and writes and reads a distributed checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from drop_in_timing import compare

ROUNDS = int(os.environ.get("ROUNDS", "7"))


def detections(rank: int, images: int) -> list[dict[str, Any]]:
    """For each image another number of boxes, as a detector finds them."""
    torch.manual_seed(rank)
    found = []
    for image in range(images):
        boxes = int(torch.randint(0, 40, ()))
        found.append({"image": image, "boxes": torch.rand(boxes, 4), "labels": torch.randint(0, 80, (boxes,))})
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    def broadcast_config() -> Any:
        config = [{"lr": 0.1, "layers": [1, 2, 3], "name": "run 7"} if rank == 0 else None]
        dist.broadcast_object_list(config, src=0)
        return config

    model = torch.nn.TransformerEncoderLayer(512, 8, dim_feedforward=2048)  # 12 MiB of parameters

    def broadcast_state() -> Any:
        state: list[Any] = [model.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(state, src=0)
        return dict(state[0])

    mine = detections(rank, 200)

    def gather_detections() -> Any:
        everybodys: list[Any] = [None] * size
        dist.all_gather_object(everybodys, mine)
        return everybodys

    def scatter_work() -> Any:
        work: list[Any] = [None]
        plan = [{"rank": i, "files": [f"part-{i}-{j}" for j in range(200)]} for i in range(size)] if rank == 0 else None
        dist.scatter_object_list(work, plan, src=0)
        return work

    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def checkpoint() -> Any:
        state = {f"layer{i}": {"weight": torch.full((64, 64), float(i)), "rank": rank} for i in range(100)}
        dcp.save(state, checkpoint_id=folder[0])
        loaded = {name: {"weight": torch.zeros(64, 64), "rank": rank} for name in state}
        dcp.load(loaded, checkpoint_id=folder[0])
        return loaded

    compare("broadcast_object_list, a small config", broadcast_config, ROUNDS * 3)
    compare("broadcast_object_list, a state dict of 12 MiB", broadcast_state, ROUNDS)
    compare("all_gather_object, 200 images of detections", gather_detections, ROUNDS)
    compare("scatter_object_list, plans of 200 names", scatter_work, ROUNDS * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own types of storage
        compare("torch.distributed.checkpoint, save and load", checkpoint, ROUNDS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
