"""The timeline of a merged trace as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .tracing_merge import Event, TraceError

# In the order of the legend; told apart by people who see colours differently, too.
COLOURS = {
    "encode": "#0072B2",
    "post": "#56B4E9",
    "wait": "#D9D9D9",
    "wire": "#E69F00",
    "decode": "#009E73",
}
_OTHER = "#CC79A7"
_ROW_INCHES = 0.55
# More arrows than this are a grey cloud.
_MOST_ARROWS = 400
_FEW_ARROWS = 60
_BAR_HEIGHT = 0.6


def draw(trace: Mapping[str, Any], path: Path, begin: float | None = None, end: float | None = None) -> None:
    """Draw ``trace`` from ``begin`` to ``end``, in milliseconds from its start, into a file of the kind its name says.

    Raises:
        TraceError: matplotlib is not there, it cannot write such a file, or there is nothing to draw.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise TraceError("the picture needs matplotlib: pip install 'objcomm[plot]'") from None
    mpl.use("agg")
    from matplotlib import pyplot as plt

    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and _inside(event, begin, end)]
    if not spans:
        raise TraceError("there is nothing to draw in that time")
    rows = _rows(spans)
    figure, axes = plt.subplots(figsize=(14, 1.6 + _ROW_INCHES * len(rows)), layout="constrained")
    try:
        for name in [*COLOURS, "other"]:
            chosen = [
                event for event in spans if event["name"] == name or (name == "other" and event["name"] not in COLOURS)
            ]
            if chosen:
                heights = [rows[_row(event)] for event in chosen]
                axes.barh(
                    heights,
                    [event["dur"] / 1e3 for event in chosen],
                    left=[event["ts"] / 1e3 for event in chosen],
                    height=_BAR_HEIGHT * (0.6 if name == "wait" else 1.0),
                    color=COLOURS.get(name, _OTHER),
                    label=name,
                    zorder=2 if name == "wait" else 3,
                )
        _arrows(axes, trace["traceEvents"], rows, begin, end)
        axes.set_yticks(list(rows.values()), _labels(trace["traceEvents"], rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        low = min(event["ts"] for event in spans) / 1e3 if begin is None else begin
        high = max(event["ts"] + event["dur"] for event in spans) / 1e3 if end is None else end
        margin = (high - low) / 100
        axes.set_xlim(low - margin, high + margin)
        axes.set_xlabel("milliseconds")
        axes.grid(axis="x", color="#EEEEEE", zorder=0)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COLOURS) + 1, frameon=False)
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise TraceError(f"{path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _inside(event: Event, begin: float | None, end: float | None) -> bool:
    after = begin is None or (event["ts"] + event["dur"]) / 1e3 >= begin
    return after and (end is None or event["ts"] / 1e3 <= end)


def _row(event: Mapping[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _rows(spans: Sequence[Event]) -> dict[tuple[int, int], int]:
    """A row for each thread, those of a rank together and the busiest first."""
    counts: dict[tuple[int, int], int] = {}
    for event in spans:
        counts[_row(event)] = counts.get(_row(event), 0) + 1
    ordered = sorted(counts, key=lambda row: (row[0], -counts[row]))
    return {row: place for place, row in enumerate(ordered)}


def _labels(events: Sequence[Event], rows: Mapping[tuple[int, int], int]) -> list[str]:
    threads = {_row(event): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    labels, seen = [], set()
    for row in rows:
        thread = threads.get(row, "")
        # A rank's own name stands once; MainThread says nothing.
        labels.append(f"rank {row[0]}" if row[0] not in seen else thread)
        if row[0] not in seen and thread not in ("MainThread", ""):
            labels[-1] = f"rank {row[0]}, {thread}"
        seen.add(row[0])
    return labels


def _arrows(axes: Any, events: Sequence[Event], rows: Mapping[tuple[int, int], int], begin: Any, end: Any) -> None:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = [event for event in events if event["ph"] == "f"]
    arrows = []
    for arrived in ends:
        sent = starts.get(arrived["id"])
        if sent is None or _row(sent) not in rows or _row(arrived) not in rows:
            continue
        if (begin is None or sent["ts"] / 1e3 >= begin) and (end is None or arrived["ts"] / 1e3 <= end):
            arrows.append((sent, arrived))
    if len(arrows) > _MOST_ARROWS:
        return
    # From the edge of one bar to that of the other, so that no bar is hidden; the more, the fainter.
    few = len(arrows) <= _FEW_ARROWS
    look = {"color": "#333333", "alpha": 0.8 if few else 0.35, "zorder": 1.5}
    for down in (True, False):
        edge = _BAR_HEIGHT / 2 if down else -_BAR_HEIGHT / 2
        chosen = [(sent, got) for sent, got in arrows if (rows[_row(got)] > rows[_row(sent)]) == down]
        starts_at = [(sent["ts"] / 1e3, rows[_row(sent)] + edge) for sent, _ in chosen]
        ends_at = [(got["ts"] / 1e3, rows[_row(got)] - edge) for _, got in chosen]
        for one, other in zip(starts_at, ends_at, strict=True):
            axes.plot([one[0], other[0]], [one[1], other[1]], linewidth=0.8 if few else 0.5, **look)
        x, y = [place[0] for place in ends_at], [place[1] for place in ends_at]
        axes.scatter(x, y, s=20 if few else 6, marker="v" if down else "^", linewidths=0, **look)
