"""``python -m objcomm doctor``: its table, its exit code, and that it tells what is wrong instead of hanging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from objcomm.cli import doctor, examine, facts, main
from objcomm.cli.facts import Check
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
FINE = Check("ok", "nnScaler", "not installed")


def _doctor(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "objcomm", "doctor", *options]
    return subprocess.run(
        command, cwd=ROOT, env={**outside, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def _facts(rank: int, **changes: Any) -> dict[str, Any]:
    return {**facts.of_this_rank(rank), "interface": None, "loopback": False, **changes}


def test_alone_it_starts_two_ranks_and_all_is_well() -> None:
    done = _doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert [one["rank"] for one in report["ranks"]] == [0, 1]
    assert report["ranks"][0]["pid"] != report["ranks"][1]["pid"]
    assert sorted((row["src"], row["dst"]) for row in report["pairs"]) == [(0, 1), (1, 0)]
    for row in report["pairs"]:
        assert row["error"] is None
        assert row["microseconds"] > 0
        assert row["mib_per_second"] > 0
        assert row["way"]
    assert {check["verdict"] for check in report["checks"]} <= {"ok", "note"}
    assert {check["name"] for check in report["checks"]} >= {"objcomm", "torch", "huge pages", "nnScaler", "backends"}


def test_a_wrong_setting_is_named_and_the_exit_code_says_so() -> None:
    done = _doctor("--timeout", "20", OBJCOMM_TRUST="everybody")
    assert done.returncode == 1
    assert "FAIL  settings" in done.stdout
    assert "trust must be 'cluster' or 'restricted', not 'everybody'" in " ".join(done.stdout.split())
    assert "Not all is well" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("size", [1, 3])
def test_it_looks_at_the_ranks_of_torchrun(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(lambda rank: main(["doctor"]), size, backend=None) == [0] * size
    out = capfd.readouterr().out
    assert out.count("objcomm doctor: ") == 1
    assert out.count("All is well.") == 1
    for src in range(size):
        for dst in range(size):
            assert (f"ok    {src:>5} {dst:>5} " in out) == (src != dst)


def test_limits_that_differ_are_told_and_every_rank_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> int:
        os.environ["OBJCOMM_MAX_BYTES"] = str(1_000_000_000 + rank)
        return main(["doctor", "--timeout", "20"])

    assert run_ranks(body, 2, backend=None) == [1, 1]
    out = capfd.readouterr().out
    assert "FAIL  max_bytes        1,000,000,000 on rank 0; 1,000,000,001 on rank 1" in out
    assert "ProtocolError" in out


def test_a_rank_that_spoils_what_it_sends_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> int:
        true_sample = examine._sample
        sent: list[int] = []

        def spoilt(of: int, device: str | None) -> dict[str, Any]:
            sample = true_sample(of, device)
            if rank == 1 and not sent:
                sample["small"][1] = ~sample["small"][1]
            sent.append(of)
            return sample

        examine._sample = spoilt  # type: ignore[assignment]
        return main(["doctor"])

    assert run_ranks(body, 2, backend=None) == [1, 1]
    assert "obj['small'][1] is another tensor" in capfd.readouterr().out


def test_a_rank_that_ends_early_is_missed(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> int:
        if rank == 1:
            examine.pairs = lambda *args: os._exit(3)
        return main(["doctor", "--timeout", "4"])

    assert run_ranks(body, 2, backend=None, may_die=[1])[0] == 1
    out = capfd.readouterr().out
    assert "FAIL  ranks            nothing was heard of rank 1" in out
    assert "PeerError" in out


def test_ranks_that_do_not_come_together_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    env: dict[str, str | None] = {"WORLD_SIZE": "2"}
    assert run_ranks(lambda rank: main(["doctor", "--timeout", "2"]), 1, backend=None, env=env) == [1]
    assert "rank 0: the ranks did not come together within 2 s" in capfd.readouterr().out


def test_facts_that_differ() -> None:
    ranks = [_facts(0), _facts(1, objcomm="0.0.9", protocol=0), _facts(2, host="other")]
    checks = {check.name: check for check in facts.judge(ranks, [3, 4, 6], FINE)}
    assert checks["objcomm"].verdict == "FAIL"
    assert "0.0.9, protocol 0 on rank 1" in checks["objcomm"].text
    assert checks["ranks"].text == "nothing was heard of rank 3-4, 6"
    assert checks["torch"] == Check("ok", "torch", torch.__version__)


def test_a_host_whose_name_leads_to_itself_only() -> None:
    alone = [_facts(0, loopback=True), _facts(1)]
    assert all(check.verdict != "FAIL" for check in facts.judge(alone, [], FINE))
    apart = [_facts(0, loopback=True, host="a"), _facts(1, host="b")]
    failed = [check for check in facts.judge(apart, [], FINE) if check.verdict == "FAIL"]
    assert [check.name for check in failed] == ["host name"]
    assert "set GLOO_SOCKET_IFNAME" in failed[0].text
    apart[0]["interface"] = "eth0"
    assert all(check.verdict != "FAIL" for check in facts.judge(apart, [], FINE))


def test_a_host_without_huge_pages_is_a_note() -> None:
    checks = facts.judge([_facts(0, huge_pages="never"), _facts(1, huge_pages="madvise")], [], FINE)
    assert [check.verdict for check in checks if check.name == "huge pages"] == ["note"]


def test_an_nnscaler_that_was_not_tested_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nnscaler").mkdir()
    (tmp_path / "nnscaler" / "__init__.py").write_text("__version__ = '9.9'\n")
    monkeypatch.setenv("NNSCALER_HOME", str(tmp_path))
    # An installed one would win over NNSCALER_HOME.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    check = facts.nnscaler()
    assert check.verdict == "FAIL"
    assert "9.9" in check.text


def test_differences_are_found_by_path() -> None:
    sample = examine._sample(3, None)
    assert examine.difference(sample, examine._sample(3, None)) is None
    for change, path in (
        ({"rank": True}, "obj['rank'] is a bool"),
        ({"name": "test"}, "obj['name'] is 'test'"),
        ({"large": sample["large"].double()}, "obj['large'] is another tensor"),
        ({"small": [sample["small"][0].contiguous(), *sample["small"][1:]]}, "obj['small'][0] is another tensor"),
    ):
        assert path in str(examine.difference(sample, {**sample, **change}))
    assert examine.difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) == "obj has other keys"


def test_table_wraps_long_reasons() -> None:
    row = {"src": 0, "dst": 1, "way": "because " * 40, "microseconds": 1234.5, "mib_per_second": None, "error": "E: x"}
    text = doctor.table([Check("ok", "torch", "1")], [_facts(0)], [row], ok=False)
    assert max(map(len, text.splitlines())) <= 118
    assert "1,234 us" in text
    assert "E: x" in text
