"""The examples, as a reader runs them: each script under torchrun's environment, on two ranks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.ranks import run_ranks

FOLDER = Path(__file__).parent.parent / "examples"
# What each must have printed. Those of nnScaler and of other frameworks are tested elsewhere.
PRINTED = {
    "nested_dict_pipeline.py": "micro-batch 3: (3, 7, 16) in, 18 real tokens out",
    "ragged_batches.py": "batch 3: [100000, 3], keys ['samples']",
    "broadcast_config.py": "rank 1: Config(width=8, rate=0.001",
    "gather_metrics.py": "7 losses, mean 0.4452",
}


@pytest.mark.parametrize("name", PRINTED)
def test_example(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(FOLDER / name)

    def body(rank: int) -> None:
        runpy.run_path(path, run_name="__main__")

    run_ranks(body, 2, backend=None)
    assert PRINTED[name] in capfd.readouterr().out


def test_every_example_says_how_to_run_it() -> None:
    for path in FOLDER.glob("*.py"):
        assert f"examples/{path.name}" in (path.read_text().split('"""')[1]), path.name


def test_every_example_is_run_by_a_test() -> None:
    """Or by ``make examples``, which needs frameworks that nothing else needs."""
    run = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    run += (FOLDER.parent / "Makefile").read_text()
    run += "".join(path.read_text() for path in FOLDER.rglob("*.py") if path.name in run)  # what these import
    scripts = [path for path in FOLDER.rglob("*") if path.suffix == ".py"]
    assert len(scripts) >= 10
    assert [path.name for path in scripts if path.name not in run and f"from {path.stem} import" not in run] == []
