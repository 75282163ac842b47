"""``python -m objcomm bench`` as a person runs it: alone, under torchrun, by mpiexec, and when something is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from objcomm.cli import main
from objcomm.cli.bench_methods import METHODS
from tests import fake_mpi
from tests.commands import ROOT, loses_a_rank
from tests.ranks import run_ranks

QUICK = ["--rounds", "2", "--seconds", "0.1"]
COMMAND = [sys.executable, "-m", "objcomm", "bench", *QUICK]
OURS = ["objcomm", "gloo", "torch", "raw"]

MINE = '''
"""A user's payloads."""

import dataclasses

import torch
from torch import zeros  # is no payload

count = 3


@dataclasses.dataclass
class Step:
    number: int
    hidden: torch.Tensor


def ragged():
    """Hidden states of several lengths."""
    return [torch.ones(n, 8) for n in range(1, count)]


def step_of_mine(number=7):
    return Step(number, zeros(300_000))


def helper(needed):
    raise AssertionError


def _hidden():
    raise AssertionError
'''


def _environment(**env: str) -> dict[str, str]:
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return {**outside, **env}


def _bench(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options],
        cwd=ROOT,
        env=_environment(**env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_starts_two_ranks_and_compares_all_methods(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    figures = tmp_path / "figures.json"
    done = _bench("--payload", "P2", "p3", str(tmp_path / "mine.py"), "--pinned", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    machine = found["machine"]
    assert machine["cores"] >= machine["usable_cores"] >= 1
    assert machine["way"].startswith("within the host")
    assert {"processor", "memory_bytes", "load_before", "python", "torch", "objcomm", "system"} <= machine.keys()
    assert found["options"] == {"rounds": 2, "seconds": 0.1, "pinned": True, "timeout": 60.0}
    assert found["one_host"] is True
    # Every method is there, or there is a reason.
    assert sorted([*found["methods"], *found["left_out"]]) == sorted(METHODS)
    assert set(found["methods"]) >= {*OURS, "memcpy"}
    rows = {row["name"]: row for row in found["payloads"]}
    assert list(rows) == ["P2", "P3", "ragged", "step_of_mine"]
    assert rows["ragged"]["title"] == "Hidden states of several lengths"
    for row in rows.values():
        large = row["bytes"] > 1 << 20
        assert row["methods"].keys() == {name for name in found["methods"] if name != "memcpy" or large}
        assert row["rounds"] == 2
        for times in row["methods"].values():
            assert len(times["times"]) == 2
            assert 0 < times["low"] <= times["median"] <= times["high"] < 60
        assert row["error"] is None
        assert row["messages"] == 1 + large
        if sys.platform == "linux":
            assert max(row["memory"].values()) < 16 << 20
    assert 2 << 20 < rows["P3"]["bytes"] < (2 << 20) + 10_000
    assert 1_200_000 < rows["step_of_mine"]["bytes"] < 1_201_000
    headings = next(line for line in done.stdout.splitlines() if line.startswith("payload"))
    assert headings.split()[1:3] == ["objcomm", "over"]
    assert "send_object_list" in headings
    assert re.search(r"^P2  nested dict, 2 tensors +[\d.]+ [um]s +[\d.]+ [um]s", done.stdout, re.MULTILINE)
    assert re.search(r"^P3  32 tensors of 64 KiB( +[\d.,]+){4,6} +2 +\+\d+\.\d / \+\d+\.\d$", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 240
    assert "\x1b" not in done.stdout


def test_it_measures_mpi4py_between_ranks_of_mpiexec(tmp_path: Path) -> None:
    env = fake_mpi.install(tmp_path / "fake")
    env["PATH"] = f"{tmp_path / 'fake'}{os.pathsep}{os.environ['PATH']}"
    done = _bench("--payload", "P1", "P2", "--json", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["started_by"] == "mpiexec"
    assert found["left_out"] == {}
    assert list(found["methods"]) == list(METHODS)
    for row in found["payloads"]:
        assert row["methods"].keys() == METHODS.keys() - {"memcpy"}
        assert row["left_out"] == {}


def test_without_an_mpi_that_works_the_reason_is_told(tmp_path: Path) -> None:
    env = fake_mpi.install(tmp_path)
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    env["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = _bench("--payload", "P1", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mpi4py is left out: mpiexec does not work: " in done.stdout
    assert "started by objcomm" in done.stdout


def test_it_uses_the_ranks_of_torchrun_and_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.svg"
    options = ["bench", *QUICK, "--largest", "20KiB", "--methods", *OURS, "memcpy", "--plot", str(picture), "--json"]
    assert run_ranks(lambda rank: main(options), 2, backend=None, env={"OBJCOMM_LOCAL_TRANSPORT": None}) == [0, 0]
    found = json.loads(capfd.readouterr().out.partition("\n")[2])
    assert found["started_by"] == "torchrun"
    assert found["payloads"] == []
    sizes = {name: [row["size"] for row in rows] for name, rows in found["sweeps"].items()}
    assert sizes == {"bytes": [1 << 10, 1 << 12, 1 << 14, 20 << 10], "tensors": [1, 10, 100, 1000, 10_000]}
    for row in found["sweeps"]["bytes"]:
        assert list(row["methods"]) == OURS
        assert row["size"] < row["bytes"] < row["size"] + 200
    # A round trip of 10,000 tensors takes longer than the 0.1 s that are left for it.
    last = found["sweeps"]["tensors"][-1]
    assert last["left_out"]["torch"] == "it would take too long"
    assert [(one["method"], one["unit"]) for one in found["growth"]] == [
        (name, unit) for unit in ("byte", "tensor") for name in ("objcomm", "gloo")
    ]
    for one in found["growth"]:
        # On a busy machine objcomm itself may need longer than there is for 10,000 tensors.
        assert one["sizes"] in ([20] if one["unit"] == "byte" else [1000, 10_000])
        assert one["times"] > 1 or one["unit"] == "byte"
    text = picture.read_text()
    assert text.startswith("<?xml")
    assert len(text) > 20_000


def test_it_refuses_another_number_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(lambda rank: main(["bench", *QUICK]), 3, backend=None) == [2, 2, 2]
    assert "the benchmark takes 2 ranks, and 3 were started" in capfd.readouterr().out


BAD = """
import threading
import torch


class Fragile:
    def __init__(self): self.x = 1
    def __getstate__(self): return {"x": 1}
    def __setstate__(self, state): raise ValueError("cannot come back")


def fails(): raise ZeroDivisionError("no object today")
def lock(): return {"lock": threading.Lock()}
def fragile(): return {"a": [Fragile()]}
def function(): return {"f": lambda x: x + 1, "t": torch.ones(3)}
def half(): return torch.ones(5, dtype=torch.bfloat16)
"""


def test_payloads_that_cannot_be_sent_are_told_and_the_rest_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    figures = tmp_path / "figures.json"
    options = ["bench", *QUICK, "--payload", str(tmp_path / "bad.py"), "P1", "--json", str(figures)]
    assert run_ranks(lambda rank: main(options), 2, backend=None) == [1, 1]
    out = capfd.readouterr().out
    rows = {row["name"]: row for row in json.loads(figures.read_text())["payloads"]}
    assert rows["fails"]["error"] == "ZeroDivisionError: no object today"
    assert "FAILED: ZeroDivisionError: no object today" in out
    assert "obj['lock']" in rows["lock"]["error"]
    assert rows["fragile"]["methods"].keys() == {"raw"}
    assert "cannot come back" in rows["fragile"]["left_out"]["objcomm"]
    assert "cannot come back" in rows["fragile"]["left_out"]["torch"]
    assert rows["function"]["methods"].keys() == {"objcomm", "gloo", "raw"}
    assert "function has no time of send_object_list: " in out
    assert rows["half"]["methods"].keys() == rows["P1"]["methods"].keys() == set(OURS)


@pytest.mark.parametrize("method", ["objcomm", "raw"])
def test_it_ends_soon_when_a_rank_dies(tmp_path: Path, method: str) -> None:
    command = [*COMMAND, "--payload", "P1", "P2", "--methods", method, "--seconds", "600", "--rounds", "10000"]
    told = loses_a_rank(command, _environment(), tmp_path / "output", shows="payload", after=0.5)
    assert re.search(r"^rank 0: \w+: ", told, re.MULTILINE), told


def test_an_aim_that_is_missed_is_told_and_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, aims: dict[Any, dict[str, float]]) -> int:
        from objcomm.cli import bench_aims

        bench_aims.AIMS.clear()
        bench_aims.AIMS.update(aims)
        return main(["bench", *QUICK, "--payload", "P1", "--methods", "objcomm", "torch", "--check"])

    assert run_ranks(body, 2, {("objcomm", "torch"): {"P1": 1e9}}, backend=None) == [1, 1]
    assert re.search(r"MISSED +P1 +objcomm 1e\+09 times as fast as send_object_list", capfd.readouterr().out)
    easy = {("objcomm", "torch"): {"P1": 1e-9, "P2": 1e9}, ("objcomm", "mpi4py"): {"P1": 2.0}}
    assert run_ranks(body, 2, easy, backend=None) == [0, 0]
    out = capfd.readouterr().out
    assert re.search(r"reached +P1 +objcomm 1e-09 times as fast as send_object_list +[\d.]+$", out, re.MULTILINE)
    assert re.search(r"not measured +P1 +objcomm 2 times as fast as mpi4py$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--payload", "P9"], "there is no payload 'P9': give one of P1 to P8, or a file that ends in .py"),
        (["--payload", "P1", "p1"], "payload 'P1' is given twice"),
        (["--payload", "{}/nowhere.py"], "nowhere.py cannot be used: FileNotFoundError"),
        (["--payload", "{}/empty.py"], "empty.py has no payloads: it should define a function"),
        (["--payload", "{}/wrong.py"], "PAYLOADS of "),
        (["--payload", "{}/raises.py"], "raises.py cannot be used: ImportError: no such thing"),
        (["--payload", "{}/leaves.py"], "leaves.py cannot be used: SystemExit: 3"),
        (["--json", "{}/nowhere/out.json"], "out.json cannot be written: there is no such folder"),
        (["--plot", "{}/nowhere/out.png"], "out.png cannot be written: there is no such folder"),
        (["--plot", "out.docx"], "out.docx cannot be written: its name must end in one of "),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("from math import pi\ndef takes(one): return one\nclass A: pass\n")
    (tmp_path / "wrong.py").write_text("PAYLOADS = [1, 2]\n")
    (tmp_path / "raises.py").write_text("raise ImportError('no such thing')\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    assert main(["bench", *(word.format(tmp_path) for word in options)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "out.png"]) == 2
    assert "pip install 'objcomm[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--rounds", "0"],
        ["--rounds", "x"],
        ["--seconds", "-1"],
        ["--largest", "many"],
        ["--largest", "12"],
        ["--largest", "2000GiB"],
        ["--methods", "carrier-pigeon"],
    ],
)
def test_values_out_of_range_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_torch_is_left_out_where_there_is_no_numpy() -> None:
    def body(rank: int) -> Any:
        import torch.distributed as dist

        from objcomm.cli import bench_methods, bench_start, payloads

        true = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "numpy" else true(name, *rest)
        bench = bench_methods.Bench(bench_start.Ranks(None, "no MPI", "a test"), list(METHODS), 30.0)
        assert dist.is_initialized()
        return bench.names, bench.left_out, [payload.name for payload in payloads.usual()]

    names, left_out, usual = run_ranks(body, 2)[0]
    assert names == ["objcomm", "gloo", "raw", "memcpy"]
    assert left_out.keys() == {"torch", "mpi4py", "mpi4py-torch"}
    assert usual == ["P1", "P2", "P3", "P4", "P5", "P6", "P8"]
