"""``python -m objcomm demo`` as a person runs it, under torchrun's environment, and when something is
wrong."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from objcomm.cli import launch, main, report
from objcomm.cli.compare import Timing
from objcomm.cli.progress import Progress
from objcomm.cli.text import LONGEST, Text
from tests.commands import ROOT, loses_a_rank
from tests.ranks import run_ranks

COMMAND = [sys.executable, "-m", "objcomm", "demo"]


def _demo(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*COMMAND, *options],
        cwd=ROOT,
        env={**outside, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_demo_trains_and_agrees_with_one_process() -> None:
    done = _demo("--steps", "4", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"step +(\d+) +loss (\S+) +in one process (\S+) +difference (\S+)", done.stdout)
    assert [int(step) for step, *_ in steps] == [1, 4]
    for _, loss, alone, difference in steps:
        assert abs(float(loss) - float(alone)) <= 1e-5
        assert float(difference) <= 1e-5
    assert float(steps[1][1]) < float(steps[0][1]) < 6.0
    sent = {
        int(rank): [int(number.replace(",", "")) for number in (objects, messages, nbytes)]
        for rank, objects, messages, nbytes in re.findall(r"rank (\d) +(\S+) +(\S+) +(\S+)\n", done.stdout)
    }
    # Four micro-batches a step cross and come back, and a summary of each step.
    assert (sent[0][0], sent[1][0]) == (16, 20)
    for objects, messages, nbytes in sent.values():
        assert messages >= objects
        assert nbytes > 16 * 1000
    assert re.search(r"context of a micro-batch +[\d,]+ +[\d,]+ us +[\d,]+ us +[\d.]+\n", done.stdout)
    assert "\x1b" not in done.stdout


def test_demo_uses_the_ranks_of_torchrun() -> None:
    assert run_ranks(lambda rank: main(["demo", "--steps", "1"]), 2, backend=None) == [0, 0]


def test_demo_refuses_another_number_of_ranks() -> None:
    assert run_ranks(lambda rank: main(["demo", "--steps", "1"]), 1, backend=None) == [1]


@pytest.mark.parametrize("spoilt", ["hidden", "mask", "positions"])
def test_demo_fails_where_a_transfer_would_change_a_value(spoilt: str, capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> int:
        from objcomm.cli import demo

        true_context = demo._context

        def wrong_context(*args: Any) -> dict[str, Any]:
            context = true_context(*args)
            if spoilt == "hidden":
                context["hidden"] = context["hidden"] * 1.01
            else:
                context["attention"][spoilt] = context["attention"][spoilt].roll(1, 0)
            return context

        if rank == 0:
            demo._context = wrong_context  # type: ignore[assignment]
        return main(["demo", "--steps", "3"])

    assert run_ranks(body, 2, backend=None) == [1, 1]
    assert "FAILED: in step 1 the loss over two ranks is" in capfd.readouterr().out


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_failing_rank_is_noticed_whichever_hangs(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.2)
    bodies = ["import sys; sys.exit(3)"]
    bodies.insert(stuck, "import time; time.sleep(60)")
    ranks = [subprocess.Popen([sys.executable, "-c", body]) for body in bodies]
    try:
        assert launch._wait(ranks) == 3
        assert ranks[stuck].poll() is None
    finally:
        ranks[stuck].kill()
        ranks[stuck].wait()


def test_demo_ends_with_an_error_when_a_rank_dies(tmp_path: Path) -> None:
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    told = loses_a_rank([*COMMAND, "--steps", "100000"], outside, tmp_path / "output", shows="loss")
    assert "rank 0: PeerError: " in told


@pytest.mark.parametrize(
    "options",
    [["--steps", "0"], ["--steps", "x"], ["--timeout", "0"], ["--timeout", "inf"], ["--seed", "-1"], ["--what"]],
)
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--steps", "--seed", "--timeout"))


def test_outside_of_torchrun_there_is_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.world_size() is None
    monkeypatch.setenv("RANK", "1")
    assert launch.world_size() == 2


def test_text_is_the_same_for_the_same_seed_and_ragged() -> None:
    text, again, other = Text(1), Text(1), Text(2)
    shapes = set()
    for step in range(4):
        for micro in range(4):
            batch, same = text.batch(step, micro), again.batch(step, micro)
            assert torch.equal(batch.tokens, same.tokens)
            assert batch.lines == same.lines
            shapes.add(tuple(batch.tokens.shape))
            assert batch.mask.sum(dim=1).tolist() == batch.lengths
            assert len(batch.lines) == len(batch.lengths) == batch.tokens.shape[0]
            assert min(batch.lengths) > 0
            assert max(batch.lengths) == batch.tokens.shape[1] <= LONGEST
            assert int(batch.positions.max()) < LONGEST
            assert torch.equal(batch.targets[:, :-1][batch.mask[:, 1:]].long(), batch.tokens[:, 1:][batch.mask[:, 1:]])
    assert len(shapes) > 8
    assert not torch.equal(text.batch(0, 0).tokens, other.batch(0, 0).tokens)


def test_text_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python sources in"):
        Text(0, tmp_path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_a_terminal_only() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress(4, stream)
        progress.show(1, "slow")
        progress.line("a line")
        progress.show(4, "done")
        progress.close()
    assert file.getvalue() == "a line\n"
    assert re.search(r"\r\x1b\[Ka line\n", terminal.getvalue())
    assert re.search(r"\r\[#+\.+\] 1/4  slow", terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_table_shows_numbers_and_ratio() -> None:
    stats = [{"objects_sent": 1, "messages_sent": 2345, "bytes_sent": 3_000_000}]
    text = report.table(stats, {"a context": Timing(objcomm=0.0002, torch=0.001, nbytes=1234)})
    assert re.search(r"rank 0 +1 +2,345 +3,000,000\n", text)
    assert re.search(r"a context +1,234 +200 us +1,000 us +5.0$", text)


def test_table_without_torch_where_numpy_is_missing() -> None:
    text = report.table([], {"a context": Timing(objcomm=0.0002, torch=None, nbytes=1234)})
    assert re.search(r"a context +1,234 +200 us +needs numpy$", text)
