"""Traces: what is in a rank's file, that a dying rank spoils nothing, and how the ranks' files become one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

import objcomm
from objcomm import timeline
from objcomm.cli import main, tracing_merge, tracing_plot
from objcomm.cli.tracing_merge import Rank
from tests.ranks import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "strict"])
PHASES = {"encode", "post", "wait", "wire", "decode"}


def _talk(rank: int) -> None:
    """Three objects to rank 1, of which one has a segment, and one back."""
    if rank == 0:
        for size in (1, 10, 400_000):
            objcomm.send_object({"x": torch.zeros(size)}, 1, channel="there")
        assert objcomm.recv_object(1, channel="back") == "thanks"
    elif rank == 1:
        for size in (1, 10, 400_000):
            assert objcomm.recv_object(0, channel="there")["x"].shape == (size,)
        objcomm.send_object("thanks", 0, channel="back")


def _spans(events: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and all(e.get(key) == value for key, value in wanted.items())]


@BACKENDS
def test_every_phase_is_there_and_every_send_is_tied_to_its_receive(tmp_path: Path, backend: str) -> None:
    def body(rank: int) -> None:
        with objcomm.trace(tmp_path / "traces"):
            _talk(rank)
        before = (tmp_path / "traces" / f"rank-{rank}.json").read_bytes()
        _talk(rank)
        assert (tmp_path / "traces" / f"rank-{rank}.json").read_bytes() == before

    run_ranks(body, 2, backend=backend)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank-0.json", "rank-1.json"]
    for rank in (0, 1):
        events = json.loads((tmp_path / "traces" / f"rank-{rank}.json").read_text())
        assert {event["name"] for event in _spans(events)} == (PHASES if rank else PHASES - {"wire"})
        assert {event["pid"] for event in events} == {rank}
        assert all(event["dur"] >= 0 for event in _spans(events))
    assert main(["trace", "merge", str(tmp_path / "traces")]) == 0
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert sorted((start["pid"], ends[key]["pid"]) for key, start in starts.items()) == [(0, 1)] * 3 + [(1, 0)]
    for key, start in starts.items():
        assert start["ts"] < ends[key]["ts"]
    posts = _spans(events, name="post", pid=0)
    assert [post["args"]["channel"] for post in posts] == ["there"] * 3
    sizes = [post["args"]["bytes"] for post in posts]
    assert sizes[0] < sizes[1] < 1000 < 1_600_000 < sizes[2] < 1_601_000
    [wire] = _spans(events, name="wire", pid=1)
    assert wire["args"] == {"peer": 0, "channel": "there", "bytes": 1_600_000}
    # The receiver cannot have seen the end of what had not begun, and the merged trace begins at zero.
    assert min(event["ts"] for event in _spans(events)) == 0


def test_the_environment_asks_for_it_and_a_killed_rank_loses_nothing(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        os.environ["OBJCOMM_TRACE"] = str(tmp_path)
        _talk(rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(body, 2, may_die=[1])
    assert not (tmp_path / "rank-1.json").read_text().strip().endswith("]")
    ranks = tracing_merge.load(tmp_path)
    assert len(_spans(ranks[1].events, name="decode")) == 3
    assert len(tracing_merge.flows(ranks)) == 4


def test_what_fails_is_in_the_trace(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        objcomm.trace(tmp_path)
        if rank == 0:
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(1, timeout=0.2)

    run_ranks(body, 2)
    [rank] = tracing_merge.load(tmp_path)
    [failed] = [event for event in rank.events if event["ph"] == "i"]
    assert failed["name"] == "TransferTimeout"
    assert "rank 1 did not come" in failed["args"]["text"]


def test_a_trace_that_cannot_be_written_harms_no_transfer(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        objcomm.trace(tmp_path)
        (tmp_path / f"rank-{rank}.json").mkdir()
        _talk(rank)

    run_ranks(body, 2)
    with pytest.raises(objcomm.UsageError, match="no traces can be written"):
        objcomm.trace("/proc/nowhere")


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    with objcomm.trace(tmp_path):
        timeline.Span("encode").end(5)
        child = os.fork()
        if child == 0:
            status = 0 if timeline.active is None else 1
            timeline.Span("decode").end(5)
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        timeline.Span("post").end(5)
    [rank] = tracing_merge.load(tmp_path)
    assert [event["name"] for event in _spans(rank.events)] == ["encode", "post"]


def test_threads_have_rows_of_their_own(tmp_path: Path) -> None:
    import threading

    with objcomm.trace(tmp_path):
        timeline.Span("encode").end(0)
        thread = threading.Thread(target=lambda: timeline.Span("decode").end(0), name="helper")
        thread.start()
        thread.join()
    [rank] = tracing_merge.load(tmp_path)
    assert {event["args"]["name"] for event in rank.events if event["name"] == "thread_name"} == {
        "MainThread",
        "helper",
    }
    assert len({event["tid"] for event in _spans(rank.events)}) == 2


def test_the_profiler_shows_the_phases_without_a_trace() -> None:
    def body(rank: int) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            _talk(rank)
        return {event.key for event in found.key_averages() if event.key.startswith("objcomm.")}

    names = {f"objcomm.{phase}" for phase in PHASES}
    assert run_ranks(body, 2) == [names - {"objcomm.wire"}, names]


def _rank(number: int, clock: str, wall: float, messages: list[tuple[str, str, float, float]]) -> Rank:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {}}]
    for name, message, start, duration in messages:
        event = {"ph": "X", "name": name, "pid": number, "tid": 1, "ts": start, "dur": duration}
        events.append({**event, "args": {"message": message}})
    return Rank(number, clock, wall, events)


def test_clocks_of_two_hosts_are_brought_together_by_their_messages() -> None:
    # The second clock is 1,000,000 us ahead. A message takes 50 us there and 70 back; others waited longer.
    ahead = 1e6
    first = _rank(0, "a", 5e6, [("post", "0>1/0", 100, 5), ("wait", "1>0/0", 300, 70), ("post", "0>1/1", 500, 5)])
    second = _rank(
        1,
        "b",
        5e6,  # and its wall clock is wrong by as much
        [("wait", "0>1/0", ahead + 90, 60), ("post", "1>0/0", ahead + 300, 5), ("wait", "0>1/1", ahead + 400, 900)],
    )
    found = tracing_merge.offsets([first, second])
    assert found["a"] == 0
    assert found["b"] == pytest.approx(-ahead + 10)  # half of the difference between there and back
    merged = tracing_merge.merge([first, second])["traceEvents"]
    sent = {event["id"]: event["ts"] for event in merged if event["ph"] == "s"}
    assert [event["ts"] - sent[event["id"]] for event in merged if event["ph"] == "f"] == pytest.approx([60, 810, 60])


def test_where_messages_go_one_way_the_wall_clock_decides_unless_it_cannot_be() -> None:
    first = _rank(0, "a", 0.0, [("post", "0>1/0", 100, 5)])
    # By the wall clocks its clock is 1,000 behind; the message would have taken 250.
    late = _rank(1, "b", 1000.0, [("wait", "0>1/0", -700, 50)])
    assert tracing_merge.offsets([first, late])["b"] == 1000.0
    # By the wall clocks it would have arrived 400 before it was sent.
    early = _rank(1, "b", 400.0, [("wait", "0>1/0", -750, 50)])
    assert tracing_merge.offsets([first, early])["b"] == 800.0


def test_a_host_that_nobody_talks_to_has_its_wall_clock() -> None:
    ranks = [_rank(0, "a", 10.0, []), _rank(1, "a", 10.5, []), _rank(2, "b", 250.0, [])]
    assert tracing_merge.offsets(ranks) == {"a": 0.0, "b": 240.0}


def test_a_group_made_anew_counts_again() -> None:
    first = _rank(0, "a", 0, [("post", "0>1/0", 1, 1), ("post", "0>1/0", 100, 1)])
    second = _rank(1, "a", 0, [("wait", "0>1/0", 2, 1), ("wait", "0>1/0", 99, 3)])
    assert [got["ts"] - sent["ts"] for sent, got in tracing_merge.flows([first, second])] == [1, -1]


@pytest.mark.parametrize("end", ["", ",", ',\n{"ph":"X","na', "\n]\n"])
def test_files_without_their_end_are_read(tmp_path: Path, end: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text('[\n{"ph":"M","name":"a"},\n{"ph":"X","name":"b"}' + end)
    assert [event["name"] for event in tracing_merge.read(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [(None, "there are no traces"), ("{}", "is no trace"), ("[1, 2", "damaged"), ('[\n{"ph":"M","name":"a"}', "clock")],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, text: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "rank-0.json").write_text(text)
    assert main(["trace", "merge", str(tmp_path)]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder with the traces of two ranks."""
    folder = tmp_path / "traces"

    def body(rank: int) -> None:
        with objcomm.trace(folder):
            _talk(rank)

    run_ranks(body, 2)
    return folder


@pytest.mark.parametrize(("name", "begins"), [("out.png", b"\x89PNG"), ("out.svg", b"<?xml"), ("out.pdf", b"%PDF")])
def test_the_picture(traces: Path, name: str, begins: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    picture = traces / name
    assert main(["trace", "plot", str(picture), str(traces)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(begins)


def test_what_is_in_the_picture(traces: Path) -> None:
    merged = tracing_merge.merge(tracing_merge.load(traces))
    picture = traces / "out.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        tracing_plot.draw(merged, picture)
    text = picture.read_text()
    for word in ("rank 0", "rank 1", *PHASES, "milliseconds"):
        assert re.search(rf">{word}<", text), word
    # A bar for every span, a line for every message.
    colours = {name: text.lower().count(f"fill: {colour.lower()}") for name, colour in tracing_plot.COLOURS.items()}
    spans = Counter(event["name"] for event in _spans(merged["traceEvents"]))
    assert colours == {name: spans[name] + 1 for name in PHASES}  # and one in the legend
    assert text.count("stroke: #333333") == 4


def test_a_part_of_the_picture(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = traces / "out.png"
    assert main(["trace", "plot", str(picture), str(traces), "--begin", "0", "--end", "1e9"]) == 0
    assert main(["trace", "plot", str(picture), str(traces), "--begin", "1e9"]) == 1
    assert "nothing to draw" in capsys.readouterr().err


def test_a_merged_file_can_be_drawn(traces: Path) -> None:
    assert main(["trace", "merge", str(traces)]) == 0
    assert main(["trace", "plot", str(traces / "out.png"), str(traces / "trace.json")]) == 0


def test_many_messages_are_no_black_wall(tmp_path: Path) -> None:
    for count in (100, 500):
        first = _rank(0, "a", 0, [("post", f"0>1/{n}", n, 0.5) for n in range(count)])
        second = _rank(1, "a", 0, [("wait", f"0>1/{n}", n + 0.2, 0.5) for n in range(count)])
        picture = tmp_path / "out.svg"
        tracing_plot.draw(tracing_merge.merge([first, second]), picture)
        assert picture.read_text().count("stroke: #333333; stroke-opacity: 0.35") == (100 if count == 100 else 0)


def test_arguments_the_wrong_way_round_are_explained(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = traces / "out.png"
    assert main(["trace", "plot", str(picture), str(traces)]) == 0
    capsys.readouterr()
    assert main(["trace", "plot", str(traces), str(picture)]) == 1
    assert "takes the picture to write first" in capsys.readouterr().err
    assert main(["trace", "plot", str(traces / "out.unknown"), str(traces)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert main(["trace", "plot", str(traces / "out.png"), str(traces)]) == 1
    assert "pip install 'objcomm[plot]'" in capsys.readouterr().err
    assert not (traces / "out.png").exists()
