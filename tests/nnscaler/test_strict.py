"""On a group as strict as NCCL, which is what nnScaler creates on GPUs: no tags, equal sizes, everything in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .cases import Outcome
from .pool import Pool
from .test_pipelines import CASES

NAMES = [
    "report",
    "1f1b",
    "interleaved 1f1b",
    "several objects and plain values",
    "replicated 2 to 2, 1f1b",
    "used by a near and a far stage",
    "data on the last rank only",
    "asynchronous",
]


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(run: Callable[..., list[Outcome]], name: str) -> None:
    run(CASES[name], backend="strict")


def test_heads_travel_beside_the_group(pool: Pool) -> None:
    case = CASES["1f1b"]
    beside, _ = pool.run("tests.nnscaler.jobs:strict_transfers", 2, case, "beside", True, backend="strict")
    within, _ = pool.run("tests.nnscaler.jobs:strict_transfers", 2, case, "within", False, backend="strict")
    assert "torch.uint8" not in beside
    assert within["torch.uint8"] >= case.samples, "without init_control heads travel on the group itself"
