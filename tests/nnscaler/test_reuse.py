"""Code that was generated without the integration."""

from __future__ import annotations

from .pool import Pool


def test_code_that_needs_it_is_generated_again(pool: Pool, version: str) -> None:
    (found,) = pool.run("tests.nnscaler.state_jobs:reuse_old_code", 1, "match")
    assert "objcomm" not in found["old"]
    assert "objcomm.move_object" in found["new"]


def test_code_that_is_loaded_already_is_refused(pool: Pool, version: str) -> None:
    (found,) = pool.run("tests.nnscaler.state_jobs:reuse_loaded_code", 1)
    assert "was generated without nnscaler_integration" in found
    assert "is loaded already" in found
    assert ("which nothing defines" if version == "0.8" else "nnscaler.runtime.adapter.move_object") in found


def test_code_that_does_not_need_it_is_reused(pool: Pool) -> None:
    (found,) = pool.run("tests.nnscaler.state_jobs:reuse_code_without_objects", 1)
    assert found["kept"]


def test_its_own_code_is_reused(pool: Pool) -> None:
    (found,) = pool.run("tests.nnscaler.state_jobs:reuse_own_code", 1)
    assert found["kept"]
