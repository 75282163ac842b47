"""examples/pipeline_1f1b.py: loss and gradients of a pipeline are those of the model without one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "pipeline_1f1b.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("pipeline_1f1b", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["pipeline_1f1b"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_a_pipeline_trains_as_the_model_without_one(world_size: int, backend: str) -> None:
    def ranks(rank: int) -> list[str]:
        example = _module()
        assert example.MICRO_BATCHES == 8
        lines: list[str] = example.run(rank, world_size)
        return lines

    *others, last = run_ranks(ranks, world_size, backend=backend, timeout=120)
    assert not any(others)
    assert len(last) == 3
    sizes = [re.findall(r"\d+", line.partition("micro-batches of ")[2]) for line in last]
    assert all(len(each) == 8 and len(set(each)) > 3 for each in sizes)


def test_a_gradient_that_is_lost_is_seen() -> None:
    def ranks(rank: int) -> str:
        from objcomm.autograd import received

        example = _module()
        if rank == 1:
            true_post = received.ReceivedObject._post

            def post(self: Any, timeout: Any) -> Any:
                for leaf in self.leaves[:1]:
                    leaf.grad = None
                return true_post(self, timeout)

            received.ReceivedObject._post = post  # type: ignore[method-assign]
        try:
            example.run(rank, 2)
        except AssertionError as error:
            return str(error)
        except Exception as error:
            return type(error).__name__
        return "the same"

    first, second = run_ranks(ranks, 2, group_timeout=4)
    assert "not close" in first
    assert second in ("PeerError", "TransferTimeout")


def test_the_script_runs_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "2"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as without a pipeline") == 3


def test_micro_batches_have_other_sizes_every_time() -> None:
    example = _module()
    batches = [batch for step in range(3) for batch in example.micro_batches(step)]
    assert len({tuple(map(len, batch)) for batch in batches}) > 20
    assert all(isinstance(sequence, torch.Tensor) for batch in batches for sequence in batch)
