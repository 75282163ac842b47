"""Two pipeline stages that share a nested dict: hidden states, a mask, lengths and names, of another size each time.

torchrun --nproc-per-node 2 examples/nested_dict_pipeline.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist

import objcomm

MICRO_BATCHES = 4


def batch(number: int) -> dict[str, Any]:
    """Sentences of different lengths, padded to the longest."""
    lengths = [3 + number, 5, 2 * number + 1]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"tokens": torch.arange(mask.numel()).reshape(mask.shape) % 50, "mask": mask, "lengths": lengths}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 2)
    if dist.get_rank() == 0:
        # All are on their way before the first is waited for: the second stage works while this one goes on.
        sends = []
        for number in range(MICRO_BATCHES):
            data = batch(number)
            context = {
                "hidden": embed(data["tokens"]).detach(),
                "attention": {"mask": data["mask"], "lengths": data["lengths"]},
                "name": f"micro-batch {number}",
            }
            sends.append(objcomm.isend_object(context, 1, channel="stage"))
        for send in sends:
            send.wait()
    else:
        arriving = [objcomm.irecv_object(0, channel="stage") for _ in range(MICRO_BATCHES)]
        for number, work in enumerate(arriving):
            context = work.wait()
            expected = batch(number)
            assert torch.equal(context["hidden"], embed(expected["tokens"]))
            assert torch.equal(context["attention"]["mask"], expected["mask"])
            assert context["attention"]["lengths"] == expected["lengths"]
            output = head(context["hidden"])[context["attention"]["mask"]]
            print(f"{context['name']}: {tuple(context['hidden'].shape)} in, {len(output)} real tokens out")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
