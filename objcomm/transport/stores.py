"""A second connection to the store of a group.

A client of torch's store serves one thread at a time: while the program waits in it, as in making another group, every
other call waits too. What the program waits for may be a peer that waits for this rank to make contact.
"""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist

from . import groups


class SecondLine:
    """The same store as a group's, over a connection that the program does not use; it is made when first needed."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._cloned: dist.Store | None = None
        self._lock = threading.Lock()

    def __call__(self) -> dist.Store:
        """The store. The first call takes its time."""
        with self._lock:
            if self._cloned is None:
                try:
                    self._cloned = self._store.clone()  # type: ignore[attr-defined]
                except (AttributeError, RuntimeError):
                    # Older versions of torch cannot do it, and a sandbox may let nothing new be opened.
                    self._cloned = self._store
            return self._cloned


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, SecondLine] = weakref.WeakKeyDictionary()


def second_line(group: dist.ProcessGroup) -> SecondLine:
    """The second connection to the store of ``group``, the same for all its peers."""
    line = _lines.get(group)
    return _lines.setdefault(group, SecondLine(groups.store_of(group))) if line is None else line
