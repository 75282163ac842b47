"""The short run of the fuzzer, and that it would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import guard, mutate, targets
from fuzz.short import replay

ROOT = Path(__file__).parent.parent


def test_the_corpus_and_some_seconds_of_changes_do_no_harm() -> None:
    """In a process of its own: what an input may do at worst is end it, or take all memory."""
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz.short", "8"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in targets.TARGETS:
        assert f"{name}: {len(guard.corpus(name))} inputs" in ran.stdout


def test_the_corpus_is_small_and_for_every_target() -> None:
    files = [path for name in targets.TARGETS for path in guard.corpus(name)]
    assert {path.parent.name for path in files} == set(targets.TARGETS) == set(mutate.MUTATORS)
    assert len(files) < 500
    assert sum(path.stat().st_size for path in files) < 1 << 20


def test_an_input_that_ends_with_an_untyped_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> None:
        raise KeyError(data)

    monkeypatch.setitem(targets.TARGETS, "notice", broken)
    with pytest.raises(SystemExit, match="notice: KeyError"):
        replay("notice")


def test_an_input_that_has_code_run_is_found() -> None:
    with pytest.raises(guard.Violation, match="something ran"), guard.watched():
        exec("pass")


def test_an_input_that_has_something_imported_is_found() -> None:
    assert "this" not in sys.modules
    with pytest.raises(guard.Violation, match="this"), guard.watched():
        compile("1", "<test>", "eval")
        sys.audit("import", "this", None, None, None, None)


def test_an_input_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SECONDS", -1.0)
    with pytest.raises(guard.Violation, match="it took"), guard.watched():
        pass
