"""What one message teaches for the next."""

from __future__ import annotations

from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Kept(dict[_K, _V]):
    """A dict of at most ``most`` entries, which starts over when it is full. Threads may share it.

    A value depends on nothing but its key, and nobody changes it.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: _K, value: _V) -> None:
        if len(self) >= self.most:
            self.clear()
        self[key] = value
