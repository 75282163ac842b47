"""A progress bar in a few lines: it draws only on a terminal, and lines printed meanwhile stay above it."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO


class Progress:
    """``total`` steps on one line of a terminal; elsewhere the bar is left out and only the lines appear."""

    def __init__(self, total: int, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        """``live`` says whether what is written comes to a terminal in the end, where the stream cannot tell."""
        self._total = total
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() if live is None else live
        self._bar = ""

    def show(self, done: int, text: str) -> None:
        """Draw the bar anew."""
        columns = shutil.get_terminal_size().columns
        width = max(10, min(40, columns - len(text) - 20))
        filled = width * done // self._total
        self._bar = f"[{'#' * filled}{'.' * (width - filled)}] {done}/{self._total}  {text}"[: columns - 1]
        self._draw(f"\r{self._bar}\x1b[K")

    def line(self, text: str = "") -> None:
        """Print a whole line above the bar."""
        self._draw("\r\x1b[K")
        print(text, file=self._stream, flush=True)
        self._draw(self._bar)

    def close(self) -> None:
        """Take the bar away."""
        self._bar = ""
        self._draw("\r\x1b[K")

    def _draw(self, text: str) -> None:
        if self._live:
            self._stream.write(text)
            self._stream.flush()
