"""A point in time that every step of one operation shares, so that a time-out bounds the whole and not each step."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """``seconds`` from now; ``None``, and anything beyond a year, means never.

    >>> Deadline(0.0).expired
    True
    """

    __slots__ = ("at", "seconds")

    # Backends and locks take a finite time-out; a year stands for never.
    NEVER = 365.0 * 24 * 3600

    def __init__(self, seconds: float | None) -> None:
        self.seconds = self.NEVER if seconds is None else min(max(0.0, seconds), self.NEVER)
        self.at = time.monotonic() + self.seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    def timedelta(self) -> timedelta:
        """What is left as backends take it: they read a zero as "no limit", so at least one millisecond."""
        return timedelta(seconds=max(0.001, self.at - time.monotonic()))

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at
