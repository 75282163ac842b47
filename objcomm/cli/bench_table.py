"""What ``python -m objcomm bench`` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .bench_aims import Verdict, ratio
from .bench_methods import METHODS
from .bench_sweep import TOLERANCE, Growth, in_bytes

WIDTH = 118
_NAME = 32
_NARROWEST = 7
_GAP = "  "
_MIB = 1 << 20

Row = Mapping[str, Any]
Column = tuple[str, str]


def in_seconds(value: float) -> str:
    """A time in three digits.

    >>> in_seconds(0.0000123), in_seconds(0.0456), in_seconds(7.891), in_seconds(1234.5)
    ('12.3 us', '45.6 ms', '7.89 s', '1,234 s')
    """
    unit, name = next((pair for pair in ((1e-6, "us"), (1e-3, "ms")) if value < 999.5 * pair[0]), (1.0, "s"))
    return f"{digits(value / unit)} {name}"


def digits(value: float) -> str:
    """Three of them, or all before the point.

    >>> digits(1.234), digits(12.34), digits(1234.5)
    ('1.23', '12.3', '1,234')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _name(row: Row) -> str:
    text = f"{row['name']:3} {row['title']}" if row["title"] else f"{row['name']:>10}"
    return f"{text if len(text) < _NAME else text[: _NAME - 2] + '…':{_NAME}}"


def _cells(values: Sequence[str], columns: Sequence[Column]) -> str:
    widths = [max(_NARROWEST, *map(len, column)) for column in columns]
    return "".join(f"{_GAP}{value:>{width}}" for value, width in zip(values, widths, strict=True))


def _heading(first: str, columns: Sequence[Column]) -> list[str]:
    lines = [_cells([column[place] for column in columns], columns) for place in (0, 1)]
    return [f"{text:{_NAME}}{cells}".rstrip() for text, cells in zip(("", first), lines, strict=True) if cells.strip()]


def _times(names: Sequence[str]) -> list[Column]:
    return [("", METHODS[name][0]) for name in names]


def heading(first: str, names: Sequence[str]) -> str:
    """The names of the methods over their columns."""
    return "\n".join(_heading(first, _times(names)))


def line(row: Row, names: Sequence[str]) -> str:
    """One way's median of every method."""
    if row["error"] is not None:
        return f"{_name(row)}  FAILED: {row['error']}"
    times = row["methods"]
    values = [in_seconds(times[name]["median"]) if name in times else "-" for name in names]
    return _name(row) + _cells(values, _times(names))


# What is compared: a method, the one that it is compared with, and the column's heading.
_RATIOS = [
    ("objcomm", "torch", ("objcomm /", "send_object_list")),
    ("objcomm", "mpi4py", ("objcomm /", "mpi4py")),
    ("objcomm", "raw", ("objcomm /", "raw bytes")),
    ("objcomm", "memcpy", ("objcomm /", "memcpy")),
    ("gloo", "torch", ("over gloo /", "send_object_list")),
]


def ratios(rows: Sequence[Row], names: Sequence[str]) -> str:
    """How many times as fast objcomm is, and what one object takes beside time."""
    chosen = [one for one in _RATIOS if one[0] in names and one[1] in names]
    columns = [column for _, _, column in chosen]
    if "objcomm" in names:
        columns += [("", "messages"), ("memory beyond", "the object, MiB")]
    lines = _heading("how many times as fast" if chosen else "", columns)
    for row in rows:
        found = [ratio(row, method, other) for method, other, _ in chosen]
        values = ["-" if value is None else digits(value) for value in found]
        if "objcomm" in names:
            values += [str(row.get("messages", "-")), _memory(row.get("memory"))]
        lines.append((_name(row) + _cells(values, columns)).rstrip())
    return "\n".join(lines)


def _memory(found: Mapping[str, int] | None) -> str:
    if found is None:
        return "-"
    # Below zero the process had some of the memory for the object already.
    return " / ".join(f"+{max(0, found[end]) / _MIB:.1f}" for end in ("send", "receive"))


def notes(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """Why a time is not there."""
    lines = [_wrapped(f"{METHODS[name][0]} is left out", reason) for name, reason in left_out.items()]
    for row in rows:
        lines += [
            _wrapped(f"{row['name'].strip()} has no time of {METHODS[name][0]}", reason)
            for name, reason in row["left_out"].items()
        ]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(f"{start}: {text}", WIDTH, subsequent_indent="  ")


def growth(found: Growth) -> str:
    """One method's growth over a sweep, in a sentence."""
    size = in_bytes if found.unit == "byte" else lambda number: f"{number:,} tensor{'s' * (number != 1)}"
    verdict = "ok    " if found.fine else "FASTER"
    text = f"{digits(found.sizes)} times the {found.unit}s take {digits(found.times)} times the time. "
    if found.rise <= 1:
        text += f"The more, the cheaper is each {found.unit}."
    else:
        text += (
            f"From {size(found.cheapest)} to {size(found.dearest)} the cost of a {found.unit} rises to "
            f"{found.rise:.2f} times"
        )
        text += "." if found.memcpy is None else f", that of a memcpy to {found.memcpy:.2f} times."
    start = f"{verdict}  {METHODS[found.method][0]:9}  "
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


GROWTH = (
    "Does the time grow no faster than the size? By the quickest round of each size. Between any two sizes the cost\n"
    f"of a byte or tensor may rise to {TOLERANCE:g} times, or by as much more as that of a byte in a memcpy does there."
)


def aims(verdicts: Sequence[Verdict]) -> str:
    """Every aim, and what has become of it."""
    words = {True: "reached", False: "MISSED", None: "not measured"}
    lines = []
    for one in verdicts:
        if one.other == "memory":
            least = f"at most {one.aim / _MIB:.1f} MiB beyond the object"
            value = "" if one.found is None else f"{max(0.0, one.found) / _MIB:.1f}"
        else:
            least = f"{METHODS[one.method][0]} {one.aim:g} times as fast as {METHODS[one.other][0]}"
            value = "" if one.found is None else digits(one.found)
        lines.append(f"{words[one.reached]:12}  {one.payload:4}  {least:50}  {value:>7}".rstrip())
    return "\n".join(lines)
