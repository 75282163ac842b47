"""What the benchmark makes of its figures: tables, the judgement of growth, the picture; and payloads of files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from objcomm.cli import bench_aims, bench_file, bench_plot, bench_sweep, bench_table, payloads
from objcomm.cli.bench_methods import METHODS


def _times(*seconds: float) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {"median": ordered[len(ordered) // 2], "low": ordered[0], "high": ordered[-1], "times": list(seconds)}


def _row(name: str = "P1", **more: Any) -> dict[str, Any]:
    row = {"name": name, "title": "small dict", "bytes": 300, "rounds": 1, "methods": {}, "left_out": {}, "error": None}
    return {**row, **more}


def test_every_column_stands_under_its_heading() -> None:
    names = list(METHODS)
    times = {name: _times(10.0**-place) for place, name in enumerate(names)}
    row = _row(title="a title that is far too long for its column", methods=times, messages=2)
    lines = [bench_table.heading("payload", names), bench_table.line(row, names)]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= bench_table.WIDTH
    for place, name in enumerate(names):
        end = lines[0].index(METHODS[name][0]) + len(METHODS[name][0])
        if lines[0][end:].startswith(" torch"):  # mpi4py is the beginning of another name
            continue
        assert lines[1][:end].endswith(bench_table.in_seconds(10.0**-place))
    assert "P1  a title that is far too lo…" in lines[1]


def test_ratios_say_how_many_times_as_fast_objcomm_is() -> None:
    methods = {"objcomm": _times(2.0), "gloo": _times(4.0), "torch": _times(10.0), "raw": _times(1.0)}
    row = _row(methods=methods, messages=3, memory={"send": -5, "receive": 3 << 20})
    text = bench_table.ratios([row], list(methods)).splitlines()
    assert text[0].split() == ["objcomm", "/", "objcomm", "/", "over", "gloo", "/", "memory", "beyond"]
    assert text[1].split()[5:8] == ["send_object_list", "raw", "bytes"]
    assert text[2].split()[3:] == ["5.00", "0.50", "2.50", "3", "+0.0", "/", "+3.0"]


def test_what_was_not_measured_is_a_dash_and_told_below() -> None:
    row = _row(methods={"objcomm": _times(0.5)}, left_out={"torch": "TypeError: cannot pickle"})
    assert bench_table.line(row, ["objcomm", "torch"]).split()[-3:] == ["500", "ms", "-"]
    notes = bench_table.notes([row], {"mpi4py": "it is not installed"})
    assert notes.splitlines() == [
        "mpi4py is left out: it is not installed",
        "P1 has no time of send_object_list: TypeError: cannot pickle",
    ]
    failed = bench_table.line(_row(error="ValueError: no"), ["objcomm", "torch"])
    assert failed.endswith("  FAILED: ValueError: no")


def test_aims_that_were_not_measured_are_no_miss() -> None:
    methods = {"objcomm": _times(1.0), "torch": _times(15.0), "gloo": _times(3.0)}
    memory = {"send": 0, "receive": (16 << 20) + 1}
    verdicts = bench_aims.judge([_row(methods=methods, memory=memory), _row("mine", methods=methods)])
    assert {(one.method, one.other): one.reached for one in verdicts} == {
        ("objcomm", "torch"): True,
        ("gloo", "torch"): True,
        ("objcomm", "mpi4py"): None,
        ("objcomm", "memory"): False,
    }
    text = bench_table.aims(verdicts)
    assert "not measured  P1    objcomm 1 times as fast as mpi4py" in text
    assert "MISSED        P1    at most 16.0 MiB beyond the object" in text


class Case(NamedTuple):
    points: list[tuple[int, float]]
    memcpy: list[tuple[int, float]]
    cheapest: int
    dearest: int
    fine: bool


@pytest.mark.parametrize(
    "case",
    [
        Case([(1, 5.0), (4, 6.0), (16, 8.0)], [], 4, 16, True),  # ever cheaper: the least fall
        Case([(1, 1.0), (4, 4.9), (16, 19.0)], [], 1, 4, True),
        Case([(1, 1.0), (4, 5.1), (16, 19.0)], [], 1, 4, False),
        # Slow steps that add up.
        Case([(1, 1.0), (4, 4.8), (16, 23.0)], [], 1, 16, False),
        Case([(1, 9.0), (4, 4.8), (16, 23.0)], [], 4, 16, True),
        # Memory is slower where a cache has ended, for a copy too.
        Case([(1, 1.0), (4, 4.0), (16, 32.0)], [(4, 1.0), (16, 8.0)], 1, 16, True),
        Case([(1, 1.0), (4, 4.0), (16, 32.0)], [(4, 1.0), (16, 4.1)], 1, 16, False),
    ],
)
def test_time_that_grows_faster_than_the_size_is_found(case: Case) -> None:
    found = bench_sweep.growth("objcomm", "byte", case.points, case.memcpy)
    assert found is not None
    assert found.fine == case.fine
    assert (found.cheapest, found.dearest) == (case.cheapest, case.dearest)
    assert bench_table.growth(found).startswith("ok " if case.fine else "FASTER")
    assert bench_sweep.growth("objcomm", "byte", case.points[:1], case.memcpy) is None


def test_growth_goes_by_the_quickest_round() -> None:
    [sweep, _] = bench_sweep.sweeps(1 << 12)
    rows = [
        {"size": 1 << 10, "methods": {"objcomm": _times(1.0, 1.0, 1.0), "memcpy": _times(1.0)}},
        {"size": 1 << 12, "methods": {"objcomm": _times(90.0, 2.0, 80.0), "memcpy": _times(1.0)}},
    ]
    [found] = bench_sweep.growths(sweep, rows, ["objcomm", "gloo"])
    assert (found.sizes, found.times, found.rise, found.fine) == (4.0, 2.0, 0.5, True)


@pytest.mark.parametrize(("largest", "last"), [(1 << 10, [1024]), (1 << 12, [1024, 4096]), (5000, [1024, 4096, 5000])])
def test_the_sweep_ends_where_it_should(largest: int, last: list[int]) -> None:
    assert bench_sweep.sweeps(largest)[0].sizes == last


def test_methods_that_would_take_too_long_are_left_out() -> None:
    names = ["objcomm", "torch", "raw", "memcpy"]
    methods = {"objcomm": _times(0.001), "torch": _times(1.0)}
    before = _row(methods=methods, left_out={"raw": "it would take too long"})
    assert bench_sweep.patient(names, None, 4.0, 1.0) == names
    # A copy of what is small is not measured, and that of something larger is.
    assert bench_sweep.patient(names, before, 4.0, 5.0) == ["objcomm", "torch", "memcpy"]
    assert bench_sweep.patient(names, before, 4.0, 3.0) == ["objcomm", "memcpy"]


def _swept() -> dict[str, Any]:
    sizes = [1 << power for power in range(10, 29, 6)]
    many = [1, 100, 10_000]
    methods = {name: _times(1e-5, 2e-5, 3e-5) for name in METHODS}
    return {
        "one_host": True,
        "options": {"rounds": 3},
        "machine": {"usable_cores": 2, "processor": "a CPU", "torch": "2", "python": "3", "objcomm": "0", "way": "so"},
        "sweeps": {
            "bytes": [_row(str(size), size=size, methods=methods) for size in sizes],
            "tensors": [_row(str(count), size=count, methods=methods) for count in many],
        },
    }


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_picture(tmp_path: Path, kind: str, magic: bytes) -> None:
    path = tmp_path / f"out.{kind}"
    bench_plot.check(path)
    bench_plot.draw(_swept(), path)
    assert path.read_bytes().startswith(magic)


def test_the_picture_is_drawn_without_the_methods_that_are_not_there(tmp_path: Path) -> None:
    found = _swept()
    for rows in found["sweeps"].values():
        for row in rows[:2]:
            row["methods"] = {"objcomm": _times(1.0)}
    bench_plot.draw(found, tmp_path / "out.svg")
    # Text is drawn as outlines, each in a group with a comment.
    assert "<!-- objcomm -->" in (tmp_path / "out.svg").read_text()
    for row in found["sweeps"]["bytes"]:
        row["methods"] = {}
    with pytest.raises(bench_plot.PlotError, match="nothing to draw"):
        bench_plot.draw(found, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("modules")
def test_payloads_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("size = 5\n")
    path = tmp_path / "my-own.py"
    path.write_text(
        "import neighbour\nPAYLOADS = {'five': lambda: [0] * neighbour.size, 'int': int}\ndef other(): pass\n"
    )
    found = bench_file.of_file(path)
    assert [(one.name, one.title, one.make(), one.foreign) for one in found] == [
        ("five", "", [0] * 5, True),
        ("int", "", 0, True),
    ]
    both = bench_file.chosen(["P8", str(path)])
    assert [one.name for one in both] == ["P8", "five", "int"]


@pytest.mark.usefixtures("modules")
def test_classes_of_a_file_are_found_by_their_name(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "json.py"  # a name that is taken
    path.write_text("class A: pass\ndef make(): return A()\n")
    [payload] = bench_file.of_file(path)
    made = payload.make()
    assert type(made).__module__ == "payloads_json"
    assert type(pickle.loads(pickle.dumps(made))) is type(made)


def test_every_payload_is_what_its_title_says() -> None:
    made = {one.name: one.make() for one in payloads.PAYLOADS if one.name not in ("P4", "P5")}
    sizes = {name: payloads.sent_bytes(obj) for name, obj in made.items()}
    assert 100 < sizes["P1"] < 400
    assert sizes["P2"] < 300
    assert 2 << 20 < sizes["P3"] < (2 << 20) + 2000
    assert 16 << 20 < sizes["P7"] < (16 << 20) + 500
    assert 64_000 < sizes["P8"] < 90_000
    assert made["P7"].pixels.nbytes == 16 << 20
    assert [tensor.shape for tensor in made["P8"]] == [(16,)] * 1000


class Named(NamedTuple):
    tensor: torch.Tensor
    number: int


def test_the_numpy_form_shares_memory_and_keeps_the_structure() -> None:
    import numpy as np

    tensor = torch.arange(6.0).reshape(2, 3)
    frame = payloads.Frame(tensor, 3, "here")
    found = payloads.as_numpy({"a": [tensor, (tensor[0], 7)], "n": Named(tensor, 1), "f": frame, "s": {1, 2}})
    assert type(found["n"]) is Named
    assert type(found["f"]) is payloads.Frame
    assert found["s"] == {1, 2}
    assert type(found["a"][1]) is tuple
    for array in (found["a"][0], found["n"].tensor, found["f"].pixels):
        assert isinstance(array, np.ndarray)
        assert array.shape == (2, 3)
    tensor[0, 1] = 40.0
    assert found["a"][0][0, 1] == found["a"][1][0][1] == 40.0
    for wrong in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()):
        with pytest.raises(TypeError):
            payloads.as_numpy([wrong])
