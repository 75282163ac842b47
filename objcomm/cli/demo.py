"""``python -m objcomm demo``: a model in two stages on two ranks, trained with objects that change size all
the time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

import objcomm
from objcomm import autograd

from . import compare, launch, model, report
from .progress import Progress
from .text import Batch, Line, Text

_MICRO_BATCHES = 4
_SHOWN = 5  # every so many steps
TOLERANCE = 1e-5

Context = dict[str, Any]


def add_to(commands: Any) -> None:
    """Add this command and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train a small model in two processes that talk through objcomm",
        description="Train a small character-level transformer on the standard library's sources: half of it on each "
        "of two ranks, which exchange a nested dict of another size with every micro-batch. The same model is trained "
        "in one process beside it, and the losses must agree. Under torchrun its two ranks are used.",
    )
    parser.add_argument("--steps", type=steps, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of the text and of the weights (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="SECONDS", help="of each transfer (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def steps(text: str) -> int:
    return int(_between(text, int(text), 1, 1_000_000))


def seed(text: str) -> int:
    return int(_between(text, int(text), 0, 2**32 - 1))


def seconds(text: str) -> float:
    return _between(text, float(text), 0.001, 86_400)


def _between(text: str, number: float, least: float, most: float) -> float:
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least:,} and {most:,}")
    return number


def run(options: argparse.Namespace) -> int:
    """Run the demo as ``options`` say. Returns 0, or 1 where something failed."""
    size = launch.world_size()
    if size is None:
        arguments = ("--steps", options.steps, "--seed", options.seed, "--timeout", options.timeout)
        return launch.start_ranks(["demo", *map(str, arguments)])
    if size != launch.RANKS:
        print(f"the demo takes {launch.RANKS} ranks, and {size} were started", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    rank = launch.join(options.timeout)
    objcomm.configure(timeout=options.timeout)
    try:
        text = Text(options.seed)
        agreed = first_rank(text, options) if rank == 0 else second_rank(text, options)
    except (objcomm.ObjcommError, OSError) as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        dist.destroy_process_group()
    return 0 if agreed else 1


def first_rank(text: Text, options: argparse.Namespace) -> bool:
    """Read the text, run the first half, and tell the user. Returns whether the losses agreed."""
    stage, _ = model.build(options.seed)
    optimizer = model.optimizer(stage)
    progress = Progress(options.steps)
    progress.line(report.opening(text, options.steps, _MICRO_BATCHES))
    start = time.monotonic()
    worst = 0.0
    for step in range(options.steps):
        batches = [text.batch(step, micro) for micro in range(_MICRO_BATCHES)]
        hidden = [stage(batch.tokens, batch.mask, batch.positions) for batch in batches]
        for output in hidden:
            output.retain_grad()
        contexts = [_context(step, *pair, batches) for pair in zip(batches, hidden, strict=True)]
        sent = [autograd.isend_object(context, 1, channel="context") for context in contexts]
        for one in sent:
            one.backward()
        optimizer.step()
        optimizer.zero_grad()
        summary = cast(Context, objcomm.recv_object(1, channel="summary"))
        worst = max(worst, summary["difference"])
        shown = report.step_line(step, summary)
        progress.show(step + 1, report.speed(step + 1, time.monotonic() - start))
        if step % _SHOWN == 0 or step == options.steps - 1 or not summary["agree"]:
            progress.line(shown)
        if not summary["agree"]:
            progress.close()
            progress.line(report.disagreement(step, summary, TOLERANCE))
            return False
    took = time.monotonic() - start
    mine = objcomm.stats()
    theirs, hardest = cast("tuple[dict[str, int], tuple[float, Line]]", objcomm.recv_object(1, channel="totals"))
    progress.show(options.steps, "measuring the transfers")
    contexts = [{**context, "hidden": context["hidden"].detach()} for context in contexts]
    gradients = [{"hidden": output.grad} for output in hidden]
    timings = {
        "context of a micro-batch": compare.time_both(contexts, 1),
        "gradient that comes back": compare.time_both(gradients, 1),
    }
    progress.close()
    progress.line(report.closing(options.steps, took, worst, hardest))
    progress.line(report.table([mine, theirs], timings))
    return True


def second_rank(text: Text, options: argparse.Namespace) -> bool:
    """Run the second half, and the whole model beside it for comparison. Returns whether the losses
    agreed."""
    _, stage = model.build(options.seed)
    optimizer = model.optimizer(stage)
    reference = Reference(text, options.seed)
    for step in range(options.steps):
        arriving = [autograd.irecv_object(0, channel="context") for _ in range(_MICRO_BATCHES)]
        returning = []
        total = 0.0
        by_line: list[tuple[float, Line]] = []
        for received in arriving:
            context: Context = received.wait()
            attention: Mapping[str, torch.Tensor] = context["attention"]
            losses = stage(context["hidden"], attention["mask"], attention["positions"], context["targets"])
            loss = losses.sum() * context["scale"]
            loss.backward()
            total += loss.item()
            mean = [loss / length for loss, length in zip(losses.tolist(), context["lengths"], strict=True)]
            by_line += zip(mean, context["lines"], strict=True)
            returning.append(received.isend_grads())
        for work in returning:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        alone = reference.step(step)
        difference = abs(total - alone)
        summary = {"loss": total, "alone": alone, "difference": difference, "agree": difference <= TOLERANCE}
        objcomm.send_object(summary, 0, channel="summary")
        if not summary["agree"]:
            return False
    objcomm.send_object((objcomm.stats(), max(by_line)), 0, channel="totals")
    for _ in range(2):
        compare.echo(0)
    return True


class Reference:
    """The same model on the same text in one process, without any transfer."""

    def __init__(self, text: Text, seed: int) -> None:
        self._text = text
        self._parts = model.build(seed)
        self._optimizer = model.optimizer(*self._parts)

    def step(self, step: int) -> float:
        """Train one step, and return its loss in nats per character."""
        first, second = self._parts
        batches = [self._text.batch(step, micro) for micro in range(_MICRO_BATCHES)]
        total = 0.0
        for batch in batches:
            hidden = first(batch.tokens, batch.mask, batch.positions)
            losses = second(hidden, batch.mask, batch.positions, batch.targets)
            loss = losses.sum() * _scale(batches)
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def _context(step: int, batch: Batch, hidden: torch.Tensor, batches: list[Batch]) -> Context:
    """What the second stage needs: nothing of it has a size that is known before."""
    return {
        "hidden": hidden,
        "attention": {"mask": batch.mask, "positions": batch.positions},
        "targets": batch.targets,
        "lengths": batch.lengths,
        "lines": batch.lines,
        "scale": _scale(batches),
        "step": step,
    }


def _scale(batches: list[Batch]) -> float:
    """Makes the sum of the losses of a step their mean per character."""
    return 1 / sum(sum(batch.lengths) for batch in batches)
