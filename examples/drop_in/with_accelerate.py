"""An evaluation with Accelerate, whose utilities for objects are torch's, with and without objcomm in torch's place.

    pip install accelerate
    torchrun --nproc-per-node 2 examples/drop_in/with_accelerate.py

A detector finds another number of boxes in every image, so Accelerate gathers its outputs as objects.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from drop_in_timing import compare

ROUNDS = int(os.environ.get("ROUNDS", "7"))
IMAGES = 96


class Detector(torch.nn.Module):
    """Boxes where a small network sees something, from none to 64 in an image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.head = torch.nn.Conv2d(8, 5, 8, stride=8)

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        maps = self.head(self.features(images).relu()).flatten(2).transpose(1, 2)
        outputs = []
        for each in maps:
            kept = each[:, 4] > 0
            outputs.append({"boxes": each[kept, :4], "scores": each[kept, 4].sigmoid()})
        return outputs


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Detector()
    data = torch.utils.data.TensorDataset(torch.randn(IMAGES, 3, 64, 64), torch.arange(IMAGES))
    model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(data, batch_size=8))
    model.eval()

    def evaluate() -> Any:
        """As Accelerate's guide has it: every batch's outputs, whatever their sizes, on every rank."""
        everybodys = []
        for images, numbers in loader:
            with torch.no_grad():
                outputs = model(images)
            found = [{"image": int(n), **output} for n, output in zip(numbers, outputs, strict=True)]
            everybodys += accelerator.gather_for_metrics(found, use_gather_object=True)
        assert sorted(each["image"] for each in everybodys) == list(range(IMAGES))
        return everybodys

    with torch.no_grad():
        mine = [output for images, _ in loader for output in model(images)]

    def gather() -> Any:
        return gather_object(mine)

    def broadcast() -> Any:
        objects: list[Any] = [model.state_dict(), {"epoch": 3}] if accelerator.is_main_process else [None, None]
        broadcast_object_list(objects, from_process=0)
        return [dict(objects[0]), objects[1]]

    compare("accelerate: an evaluation, batch by batch", evaluate, ROUNDS)
    compare("accelerate: gather_object, all outputs", gather, ROUNDS)
    compare("accelerate: broadcast_object_list", broadcast, ROUNDS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
