"""A generated module on another rank: it is itself there, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .composite_cases import Composed
from .pool import Pool

JOBS = "tests.nnscaler.sending_jobs"


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (Composed(), "gloo"),
        (Composed("Tied"), "gloo"),
        (replace(Composed(), plan=1), "gloo"),
        (replace(Composed(), plan=1), "strict"),
    ],
    ids=str,
)
def test_it_is_rebuilt_and_comes_back(pool: Pool, tmp_path: Path, case: Composed, backend: str) -> None:
    _, found = pool.run(f"{JOBS}:there_and_back", 2, case, str(tmp_path), backend=backend)
    assert found["classes"] == 2
    assert (
        "RuntimeError: rank 0's part of tests.nnscaler.composite_models.Block of 2 does not run here" in found["said"]
    )
    assert "where this is rank 1 of 2" in found["said"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("removed", "which is not here; looked at"),
        ("changed", "(other code)"),
        ("loaded", "other code, is loaded as"),
        ("imported", "was changed since"),
    ],
)
def test_without_its_code_it_is_refused(pool: Pool, tmp_path: Path, how: str, said: str) -> None:
    sender, receiver = pool.run(f"{JOBS}:not_there", 2, str(tmp_path), how)
    assert sender["sent"] == "nothing"
    assert receiver["received"].startswith("DecodeError")
    assert said in receiver["received"]
    assert f"{tmp_path}/_parallel_modules" in receiver["received"]
    assert receiver["then"] == "afterwards"
    pool.close()  # names of another run are loaded there


def test_restricted_trust_refuses_it(pool: Pool, tmp_path: Path) -> None:
    sender, receiver = pool.run(f"{JOBS}:restricted", 2, str(tmp_path))
    assert sender["sent 0"].startswith("TrustError")
    assert receiver["received 0"].startswith("PeerError")
    assert receiver["received 1"].startswith("TrustError")


def test_a_class_is_itself_or_refused(pool: Pool, tmp_path: Path) -> None:
    _, said = pool.run(f"{JOBS}:class_alone", 2, str(tmp_path))
    assert said.startswith("DecodeError")
    assert "gencode0" in said
