"""torch's own tests of its object calls, as its wheel ships them, with objcomm in torch's place and without.

They live in torch.testing._internal, in a class whose ranks torch would start itself; here its methods run in the
ranks of tests/ranks.py. What needs a particular number of ranks, or is marked as failing by torch for other reasons, is
run by the body that the marked test calls.
"""

from __future__ import annotations

import ast
import inspect
import os
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import torch_compat
from objcomm.torch_compat.groups import NAMES
from tests.ranks import run_ranks

# Test methods, or the bodies that they call, of DistributedTest._DistTestBase.
METHODS = [
    "test_all_gather_object_default_pg",
    "test_all_gather_object_subgroup",
    "_test_gather_object",
    "_test_broadcast_object_list",
    "_test_broadcast_object_list_subgroup",
    "test_scatter_object_list",
]
FOUR_RANKS = ["test_gather_object", "test_gather_object_subgroup"]
# Helpers of torch's tests that use object calls; the tests that use them need accelerators, they themselves do not.
HELPERS = ["_rank_temp_file", "_assert_module_states", "_broadcast_state_dict", "with_temp_dir"]
# All else in torch.testing._internal that names an object call.
OTHERS = [
    # Marked as failing by torch; it only calls _test_broadcast_object_list.
    "test_broadcast_object_list",
    # The body of the two tests of all_gather_object.
    "_test_allgather_object",
    # They need accelerators. test_torch_compat.py gathers modules and optimizer states, as they do.
    "_test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_post_localSGD_optimizer_step_reload",
    # Inside of with_temp_dir.
    "wrapper",
]


def _shipped(world_size: int, folder: str) -> tuple[ModuleType, ModuleType, ModuleType]:
    """torch's modules. They read what they are about from the environment when they are imported."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR=folder)
    from torch.testing._internal import common_fsdp
    from torch.testing._internal.distributed import checkpoint_utils, distributed_test

    return distributed_test, common_fsdp, checkpoint_utils


def _run_methods(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, str]:
    """The outcome of each method on this rank: an empty text where it passed."""
    shipped, _, _ = _shipped(world_size, folder)
    from torch.testing._internal.common_utils import TestCase

    base: Any = shipped.DistributedTest._DistTestBase
    case = type("Shipped", (base, TestCase), {"rank": rank, "world_size": world_size})
    outcomes = {}
    for name in names:
        result = unittest.TestResult()
        case(name).run(result)
        problems = [text for _, text in [*result.errors, *result.failures, *result.skipped]]
        outcomes[name] = "\n".join(problems) if result.testsRun == 1 else "did not run"
        dist.barrier()
    return outcomes


def _use_helpers(rank: int, world_size: int, folder: str) -> None:
    shipped, common_fsdp, checkpoint_utils = _shipped(world_size, folder)
    with shipped._rank_temp_file() as name:
        assert os.path.exists(name)
        dist.barrier()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    pairs = []
    common_fsdp._assert_module_states(model, dist.group.WORLD, lambda a, b: pairs.append(torch.equal(a, b)))
    assert pairs == [True] * len(model.state_dict()) * (world_size - 1)

    sent = {"w": torch.full((3,), float(rank)), "n": torch.tensor(rank)}
    state = common_fsdp._broadcast_state_dict(rank, sent)
    assert state["w"].tolist() == [0.0] * 3 and int(state["n"]) == 0

    class Case:
        temp_dir = ""

        @checkpoint_utils.with_temp_dir
        def save(self) -> None:
            names: list[Any] = [None] * world_size
            dist.all_gather_object(names, self.temp_dir)
            assert os.path.isdir(names[0]) and names == [names[0]] * world_size
            dist.barrier()

    Case().save()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_with_objcomm_in_torchs_place(world_size: int, tmp_path: Path) -> None:
    names = METHODS + (FOUR_RANKS if world_size == 4 else [])

    def ranks(rank: int) -> tuple[dict[str, str], int]:
        torch_compat.install()
        outcomes = _run_methods(rank, world_size, str(tmp_path), names)
        _use_helpers(rank, world_size, str(tmp_path))
        return outcomes, objcomm.stats()["objects_sent"] + objcomm.stats()["objects_received"]

    results = run_ranks(ranks, world_size, timeout=150)
    assert [outcomes for outcomes, _ in results] == [dict.fromkeys(names, "")] * world_size
    # It was objcomm that they ran on.
    assert all(moved >= len(names) for _, moved in results)


def test_without_it_they_pass_too(tmp_path: Path) -> None:
    """So what is above tests the calls, and not how they are run here."""
    names = METHODS + FOUR_RANKS

    def ranks(rank: int) -> tuple[dict[str, str], int]:
        outcomes = _run_methods(rank, 4, str(tmp_path), names)
        _use_helpers(rank, 4, str(tmp_path))
        return outcomes, objcomm.stats()["objects_sent"]

    assert run_ranks(ranks, 4, timeout=150) == [(dict.fromkeys(names, ""), 0)] * 4


def test_a_failure_of_one_of_them_is_seen(tmp_path: Path) -> None:
    def ranks(rank: int) -> dict[str, str]:
        def broken(object_list: list[Any], obj: Any, group: Any = None) -> None:
            object_list[:] = ["not", "it"]

        dist.all_gather_object = broken
        return _run_methods(rank, 2, str(tmp_path), ["test_all_gather_object_default_pg", "test_gather_object"])

    for outcomes in run_ranks(ranks, 2):
        assert "AssertionError" in outcomes["test_all_gather_object_default_pg"]
        assert "requires an exact world size of 4" in outcomes["test_gather_object"]  # a skip is not a pass


def test_no_shipped_test_of_an_object_call_is_missing() -> None:
    """Every function of torch.testing._internal that names an object call is run above, or named with its reason."""
    found = set()
    for path in (Path(inspect.getfile(torch)).parent / "testing" / "_internal").rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in NAMES):
            found |= set(_functions_that_call(ast.parse(text), {*NAMES, "_rank_temp_file"}))
    assert found - {*METHODS, *FOUR_RANKS, *HELPERS, *OTHERS} == set()
    assert len(found) > 10


def _functions_that_call(tree: ast.Module, names: set[str]) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(
            (isinstance(inner, ast.Attribute) and inner.attr in names)
            or (isinstance(inner, ast.Name) and inner.id in names)
            for inner in ast.walk(node)
        )
    ]
