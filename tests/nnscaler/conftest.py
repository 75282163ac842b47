"""Tests that need nnScaler take a fixture from here, and are skipped where there is none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from .cases import Case, Outcome
from .pool import Pool

_numbers = count()


def find_version() -> str | None:
    """The version of nnScaler that the ranks would import, without importing it here."""
    home = Path(os.environ.get("NNSCALER_HOME", "")) / "nnscaler" / "version.py"
    spec = importlib.util.find_spec("nnscaler")
    path = Path(str(spec.origin)).with_name("version.py") if spec and spec.origin else home
    if not path.is_file():
        return None
    scope: dict[str, Any] = {}
    exec(path.read_text(), scope)
    return str(scope["__version__"])


@pytest.fixture(scope="session")
def version() -> str:
    found = find_version()
    if found is None:
        pytest.skip("needs nnScaler: it is not installed, and NNSCALER_HOME names no checkout of it")
    return found


@pytest.fixture(scope="session")
def pool(version: str) -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.remove()


@pytest.fixture
def run(pool: Pool) -> Callable[..., list[Outcome]]:
    """Generate, train, infer and compare on several ranks; see jobs.run_case."""

    def run(case: Case, world_size: int | None = None, **options: Any) -> list[Outcome]:
        __tracebackhide__ = True
        size = case.plan if world_size is None else world_size
        return pool.run("tests.nnscaler.jobs:run_case", size, case, f"case{next(_numbers)}", **options)

    return run
