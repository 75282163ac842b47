"""Every attempt of attacks/ ends with the right refusal, in bounded time, without an abort."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import __main__ as attacks
from objcomm.errors import DecodeError

ROOT = Path(__file__).parent.parent
_LINE = re.compile(r"(\w+) \((cluster|restricted)\): refused: (TrustError|LimitError|DecodeError|ProtocolError): .+")


def test_every_attempt_is_refused_in_both_trust_modes_where_it_applies() -> None:
    """In a process that has no threads yet: each attempt is a fork of it."""
    ran = subprocess.run(
        [sys.executable, "-m", "attacks"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    refused = {found.groups()[:2] for found in map(_LINE.match, ran.stdout.splitlines()) if found}
    assert refused == {(name, trust) for name, (_, trusts) in attacks.ALL.items() for trust in trusts}
    assert {trust for _, trust in refused} == {"cluster", "restricted"}


def test_one_that_is_taken_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(attacks.ALL, "taken", (lambda trust: [1], ("cluster",)))
    assert attacks.run("taken", "cluster") == 1
    assert "failed: it was taken, as list" in capsys.readouterr().out


def test_one_that_ends_with_another_error_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def untyped(trust: str) -> None:
        raise KeyError(trust)

    monkeypatch.setitem(attacks.ALL, "untyped", (untyped, ("cluster",)))
    assert attacks.run("untyped", "cluster") == 1
    assert "failed: it ended with KeyError" in capsys.readouterr().out


def test_one_that_takes_its_time_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(trust: str) -> None:
        raise DecodeError("at last")

    monkeypatch.setitem(attacks.ALL, "slow", (slow, ("cluster",)))
    monkeypatch.setattr(attacks, "_BUSY_SECONDS", -1.0)
    assert attacks.run("slow", "cluster") == 1
    assert "failed: refused after" in capsys.readouterr().out
