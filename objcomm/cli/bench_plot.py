"""The sweep of a benchmark as a picture: latency and throughput over size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .bench_machine import in_a_line
from .bench_methods import METHODS
from .bench_sweep import ELEMENTS, in_bytes

# Told apart by people who see colours differently, too: by colour, marker and line.
_STYLES: dict[str, tuple[str, str, str, float]] = {
    "objcomm": ("#0072B2", "o", "-", 2.4),
    "gloo": ("#56B4E9", "s", "-", 1.6),
    "mpi4py": ("#009E73", "^", "-", 1.6),
    "torch": ("#D55E00", "D", "-", 1.6),
    "raw": ("#777777", "", "--", 1.4),
    "memcpy": ("#BBBBBB", "", ":", 1.8),
}
_INK = "#333333"
_GRID = "#E6E6E6"
_GIB = 1 << 30

Row = Mapping[str, Any]
Value = Callable[[Row, float], float]


class PlotError(Exception):
    """The picture cannot be drawn."""


def check(path: Path) -> None:
    """Whether :func:`draw` could write there.

    Raises:
        PlotError: matplotlib is not installed, or it cannot write files of this kind.
    """
    figure = _matplotlib().figure.Figure()
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise PlotError(f"{path} cannot be written: its name must end in one of .{', .'.join(sorted(kinds))}")


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl
        import matplotlib.figure
    except ImportError:
        raise PlotError("the picture needs matplotlib: pip install 'objcomm[plot]'") from None
    return mpl


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the sweeps of a run into a file of the kind that its name says.

    Raises:
        PlotError: there is nothing to draw, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    mpl = _matplotlib()
    in_size = [row for row in found["sweeps"].get("bytes", []) if row["methods"]]
    in_number = [row for row in found["sweeps"].get("tensors", []) if row["methods"]]
    if not in_size or not in_number:
        raise PlotError("there is nothing to draw: no size of the sweep could be measured")
    names = [name for name in _STYLES if any(name in row["methods"] for row in [*in_size, *in_number])]
    with mpl.rc_context({"font.size": 10, "axes.titlesize": 11, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = mpl.figure.Figure(figsize=(12, 8.4), layout="constrained")
        above, below = figure.subplots(2, 2)
        _panel(above[0], in_size, names, lambda row, took: took, "One tensor: time one way")
        _panel(above[1], in_size, names, lambda row, took: row["size"] / took / _GIB, "One tensor: GiB a second")
        _panel(below[0], in_number, names, lambda row, took: took, f"Many tensors of {ELEMENTS} elements: time one way")
        per = f"Many tensors of {ELEMENTS} elements: time for each"
        _panel(below[1], in_number, names, lambda row, took: took / row["size"], per)
        for axes in (above[0], below[0], below[1]):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: _time(value))
            axes.tick_params(axis="y", which="minor", length=0)
        above[1].set_ylim(0, 1.15 * _fastest(in_size))
        for axes in above:
            axes.set_xscale("log", base=2)
            ticks = [row["size"] for row in in_size]
            axes.set_xticks(ticks, [in_bytes(size) for size in ticks], rotation=40, ha="right", rotation_mode="anchor")
            axes.set_xticks([], minor=True)
        for axes in below:
            axes.set_xscale("log")
            ticks = [row["size"] for row in in_number]
            axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("tensors in one object")
        handles, labels = above[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=len(labels),
            frameon=False,
            title=f"Objects between two ranks of {'one host' if found['one_host'] else 'two hosts'}",
            title_fontproperties={"size": 14, "weight": "bold"},
            alignment="left",
        )
        figure.supxlabel(_caption(found), fontsize=8.5, color="#777777")
        figure.savefig(path, dpi=150)


def _panel(axes: Any, rows: Sequence[Row], names: Sequence[str], value: Value, title: str) -> None:
    for name in names:
        points = [(row["size"], row["methods"][name], row) for row in rows if name in row["methods"]]
        if not points:
            continue
        colour, marker, style, width = _STYLES[name]
        sizes = [size for size, _, _ in points]
        low, median, high = (
            [value(row, times[which]) for _, times, row in points] for which in ("low", "median", "high")
        )
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            sizes,
            median,
            color=colour,
            marker=marker,
            linestyle=style,
            linewidth=width,
            markersize=5,
            label=METHODS[name][0],
            zorder=4 if name == "objcomm" else 3,
        )
    axes.margins(x=0.03)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#AAAAAA")
    axes.tick_params(color="#AAAAAA", labelcolor=_INK)


def _fastest(rows: Sequence[Row]) -> float:
    """GiB a second, of any transfer, and of a copy that no cache helps."""
    rates: list[float] = [
        row["size"] / times["high" if name == "memcpy" else "low"] / _GIB
        for row in rows
        for name, times in row["methods"].items()
        if name != "memcpy" or row is rows[-1]
    ]
    return max(rates)


def _time(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit * 0.9999:
            return f"{value / unit:g} {name}"
    return f"{value * 1e9:g} ns"


def _caption(found: Mapping[str, Any]) -> str:
    return (
        f"Two ranks, median of up to {found['options']['rounds']} rounds in turns, quartiles shaded. "
        f"{in_a_line(found['machine'])}.\nobjcomm's way: {found['machine']['way']}"
    )
