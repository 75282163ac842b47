"""What the demo tells its user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .compare import Timing
from .text import Line, Text


def opening(text: Text, steps: int, micro_batches: int) -> str:
    return (
        f"Training on {text.characters:,} characters of {text.modules} modules of the standard library: "
        f"{steps} steps of {micro_batches} micro-batches.\n"
        "Rank 0 has the first half of the model, rank 1 the second; every object that crosses has another size.\n"
    )


def step_line(step: int, summary: Mapping[str, Any]) -> str:
    return (
        f"step {step + 1:4}   loss {summary['loss']:.6f}   in one process {summary['alone']:.6f}   "
        f"difference {summary['difference']:.1e}"
    )


def speed(done: int, seconds: float) -> str:
    return f"{done / seconds:.1f} steps/s"


def disagreement(step: int, summary: Mapping[str, Any], tolerance: float) -> str:
    return (
        f"FAILED: in step {step + 1} the loss over two ranks is {summary['loss']!r}, and in one process "
        f"{summary['alone']!r}: they differ by more than {tolerance:g}."
    )


def closing(steps: int, seconds: float, worst: float, hardest: tuple[float, Line]) -> str:
    loss, line = hardest
    return (
        f"\n{steps} steps in {seconds:.1f} s; the largest difference to the model in one process: {worst:.1e}.\n"
        f"Hardest line of the last step: {line.module}.py:{line.number}, {loss:.2f} nats a character.\n"
    )


def table(stats: Sequence[Mapping[str, int]], timings: Mapping[str, Timing]) -> str:
    """What was sent in training, and what one transfer takes."""
    rows = [f"{'sent in training':26}{'objects':>12}{'messages':>12}{'bytes':>16}"]
    for rank, sent in enumerate(stats):
        numbers = f"{sent['objects_sent']:12,}{sent['messages_sent']:12,}{sent['bytes_sent']:16,}"
        rows.append(f"{f'rank {rank}':26}{numbers}")
    rows += ["", f"{'one transfer, median':26}{'bytes':>12}{'objcomm':>12}{'send_object_list':>20}{'ratio':>9}"]
    for name, timing in timings.items():
        mine = timing.objcomm * 1e6
        if timing.torch is None:
            rows.append(f"{name:26}{timing.nbytes:12,}{mine:9,.0f} us{'needs numpy':>20}")
            continue
        theirs = timing.torch * 1e6
        rows.append(f"{name:26}{timing.nbytes:12,}{mine:9,.0f} us{theirs:17,.0f} us{theirs / mine:9.1f}")
    return "\n".join(rows)
