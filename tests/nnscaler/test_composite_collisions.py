"""A name that is taken already never gives somebody else's code or weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pool import Pool

JOBS = "tests.nnscaler.collision_jobs"
OTHER = "tests.nnscaler.composite_models.Other"


@pytest.mark.parametrize(
    "how", ["match", "moo", "override", "folder", "folder override", "name", "class", "not loaded"]
)
def test_the_second_module_of_a_class(pool: Pool, tmp_path: Path, how: str) -> None:
    (found,) = pool.run(f"{JOBS}:second", 1, str(tmp_path), how)
    if how == "name":
        assert found == [2.0]
    elif how == "not loaded":
        assert found is None
    else:
        assert isinstance(found, str)
        assert found.startswith("RuntimeError: Code generation failed") or how == "class"
        assert {
            "match": "with the weights of another Other: linear.weight, linear.bias would not be",
            "moo": "with the weights of another Other: linear.weight, linear.bias would not be",
            "override": "is already loaded. You can not override a loaded module",
            "folder": "is loaded under that name in this process already",
            "folder override": "is loaded under that name in this process already",
            "class": "with the weights of another Other",
        }[how] in found.replace("linear.bias, linear.weight", "linear.weight, linear.bias")
        if how.startswith("folder"):
            assert f"{tmp_path}/a/_parallel_modules" in found
            assert f"{tmp_path}/b/_parallel_modules" in found


@pytest.mark.parametrize("how", ["match", "folder"])
def test_what_nnscaler_alone_does(pool: Pool, tmp_path: Path, how: str) -> None:
    """The control: this is what is prevented."""
    (found,) = pool.run(f"{JOBS}:second_alone", 1, str(tmp_path), how)
    assert found == [1.0]


@pytest.mark.parametrize("name", ["a/b", "/a", "a..b", "a\\b"])
def test_an_instance_name_is_no_path(pool: Pool, tmp_path: Path, name: str) -> None:
    (found,) = pool.run(f"{JOBS}:path_as_name", 1, str(tmp_path), name)
    assert f"instance_name {name!r} is part of the name of a Python module" in found
    assert not list(tmp_path.rglob("*.py"))


def test_another_folder_on_the_import_path(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(f"{JOBS}:shadowed", 1, str(tmp_path)) == [[2.0]]


def test_a_file_that_was_written_again(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(f"{JOBS}:written_again", 1, str(tmp_path))
    assert "was written again after this process had loaded" in found


def test_old_bytecode_is_not_run(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(f"{JOBS}:stale_bytecode", 1, str(tmp_path)) == [2.0]


def test_another_class_of_the_same_name(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(f"{JOBS}:other_class", 1, str(tmp_path))
    assert f"for another class that is called {OTHER} too" in found


STALE = """
import torch

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4), persistent=False)
        self.factor = 2.0

    def forward(self, x):
        return self.factor * self.linear(x) + self.shift

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Part(), Part()

    def forward(self, x):
        return self.two(self.one(x)).sum()
"""


def test_a_folder_of_an_earlier_run(pool: Pool, tmp_path: Path) -> None:
    def run(source: str, seed: int, reuse: str) -> list[object]:
        pool.close()
        return pool.run(f"{JOBS}:stale_folder", 2, str(tmp_path), source, seed, reuse)

    first = run(STALE, 1, "match")[0]
    assert run(STALE, 2, "match")[0] == first  # other weights: the code is the same, the weights are the new ones
    for changed in (STALE.replace("2.0", "3.0"), STALE.replace("+ self.shift", "- self.shift")):
        said = run(changed, 2, "match")
        assert all("parallelizing one failed" in str(text) for text in said)
        assert "do not match with current config" in str(said[0])
        assert run(changed, 2, "moo")[0] != first
    pool.close()


def test_two_models_of_one_class(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(f"{JOBS}:same_names_twice", 2, str(tmp_path))
    assert "parallelizing first failed" in found[0] and "parallelizing first failed" in found[1]
    assert "is already loaded. You can not override a loaded module" in found[0]


def test_code_that_a_tool_loads(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(f"{JOBS}:loaded_by_a_tool", 1, str(tmp_path))
    assert "is loaded under that name in this process already" in found
    assert f"{tmp_path}/a/_parallel_modules" in found and f"{tmp_path}/b/_parallel_modules" in found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("end2end", "ValueError: first: use_end2end is for whole models"),
        ("arguments", "ValueError: first: Block.forward takes no y"),
        ("option", "ValueError: instance_name: parallelize_submodules sets that itself"),
        ("nothing given", "ValueError: first has no pas_policy"),
        ("not installed", "RuntimeError: nnscaler_integration.install() comes first"),
        ("failing", "RuntimeError: parallelizing first failed"),
        ("again", "ValueError: first is parallelized already"),
    ],
)
def test_what_is_refused_changes_nothing(pool: Pool, tmp_path: Path, what: str, said: str) -> None:
    found = pool.run(f"{JOBS}:refused", 2, str(tmp_path), what)
    assert all(text.startswith(said) for text in found), found
    assert ("the policy cannot do it" in found[0]) == (what == "failing")
