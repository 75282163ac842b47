"""A pipeline in plain PyTorch whose stages pass any nested object, forward and backward, in the 1F1B schedule.

    python examples/pipeline_1f1b.py 4          # four processes on this machine; 2 without a number
    torchrun --nproc-per-node=2 examples/pipeline_1f1b.py

What passes from stage to stage is an object of the user's own class: ragged sequences, the outputs of all earlier
stages for skip connections, a mask, plain values. Every micro-batch has other sizes, and no stage is told any of them.
The same model is trained without a pipeline beside it: loss and gradients must be the same.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that it runs without objcomm being installed

import torch
import torch.distributed as dist
from torch import Tensor, nn

from objcomm import autograd

WIDTH = 16
MICRO_BATCHES = 8
STEPS = 3

Batch = list[Tensor]


# -- the pipeline: it knows nothing of the model ----------------------------------------------------------------------


def train_step(stage: Callable[[Any], Any], batches: Sequence[Any], rank: int, world_size: int) -> list[Tensor]:
    """Run all micro-batches through this rank's stage, forward and backward, in the 1F1B schedule.

    Args:
        stage: on the first rank it takes a micro-batch, on the others what the stage before returned; on the last it
            returns a loss. What is passed may be any object that objcomm can send.
        batches: the micro-batches; other ranks than the first only need as many of anything.
        rank, world_size: this stage and the number of stages, which are the ranks of the default group.

    Returns:
        On the last rank the loss of each micro-batch, elsewhere nothing. Gradients are in the parameters' ``.grad``.
    """
    first, last = rank == 0, rank == world_size - 1
    waiting: deque[tuple[autograd.ReceivedObject | None, autograd.SentObject | Tensor]] = deque()
    returning = []
    losses = []

    def forward(batch: Any) -> None:
        received = None if first else autograd.recv_object(rank - 1, channel="forward")
        out = stage(batch if received is None else received.obj)
        if last:
            losses.append(out.detach())
        waiting.append((received, out if last else autograd.isend_object(out, rank + 1, channel="forward")))

    def backward() -> None:
        received, out = waiting.popleft()
        out.backward()
        if received is not None:
            returning.append(received.isend_grads())

    # The stages after this one must have work before this one turns to its first backward pass.
    ahead = min(world_size - rank - 1, len(batches))
    for batch in batches[:ahead]:
        forward(batch)
    for batch in batches[ahead:]:
        forward(batch)
        backward()
    while waiting:
        backward()
    for work in returning:
        work.wait()
    return losses


# -- a model for it ---------------------------------------------------------------------------------------------------


@dataclass
class Passed:
    """What one stage hands to the next."""

    sequences: list[Tensor]  # of each sequence [length, width]; lengths differ
    skips: dict[str, Tensor]  # what earlier stages made of all tokens: [tokens, width] each
    mask: Tensor  # [tokens], which of them count
    lengths: list[int]
    note: str


class Stage(nn.Module):
    """The first turns a batch into what is passed, the last turns that into a loss, and all compute."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.number, self.count = number, count
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.within = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1) if number == count - 1 else None

    def forward(self, given: Any) -> Any:
        passed = opened(given) if self.number == 0 else given
        # Each sequence attends to its own mean only, so they are never padded.
        mixed = [torch.tanh(self.mix(s) + self.within(s.mean(0))) for s in passed.sequences]
        tokens = torch.cat(mixed)
        if self.out is not None:
            tokens = tokens + sum(passed.skips.values())
            return (self.out(tokens).squeeze(1).pow(2) * passed.mask).sum()
        skips = {**passed.skips, f"stage {self.number}": tokens}
        return Passed(mixed, skips, passed.mask, passed.lengths, f"from stage {self.number}")


def opened(batch: Batch) -> Passed:
    tokens = torch.cat(batch)
    return Passed(batch, {}, tokens[:, 0] > 0, [len(sequence) for sequence in batch], "from the data")


def stages(count: int) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(number, count) for number in range(count)]


def micro_batches(step: int) -> list[Batch]:
    """Every one has other sizes: one to four sequences of one to twelve tokens."""
    random = torch.Generator().manual_seed(step)

    def size(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=random))

    return [[torch.randn(size(12), WIDTH, generator=random) for _ in range(size(4))] for _ in range(MICRO_BATCHES)]


# -- both beside each other -------------------------------------------------------------------------------------------


def run(rank: int, world_size: int) -> list[str]:
    """Train both, compare, and return the lines to print."""
    stage = stages(world_size)[rank]
    whole = nn.Sequential(*stages(world_size))
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    lines = []
    for step in range(STEPS):
        batches = micro_batches(step)
        losses = train_step(stage, batches, rank, world_size)

        wanted = []
        for batch in batches:
            loss = whole(batch)
            loss.backward()
            wanted.append(loss.detach())

        twin = whole[rank]
        for parameter, alone in zip(stage.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, alone.grad, rtol=1e-5, atol=1e-5)
        if losses:
            torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=1e-5, atol=1e-5)
            total = float(torch.stack(losses).sum())
            tokens = [sum(map(len, batch)) for batch in batches]
            lines.append(f"step {step}: loss {total:.4f}, as without a pipeline; micro-batches of {tokens} tokens")
        for one in (optimizer, whole_optimizer):
            one.step()
            one.zero_grad()
    return lines


def main(rank: int | None = None, world_size: int = 2, port: int = 0) -> None:
    torch.set_num_threads(1)
    if rank is None:  # under torchrun
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    for line in run(rank, world_size):
        print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        start: Any = torch.multiprocessing.spawn
        start(main, (size, server.port), nprocs=size)
