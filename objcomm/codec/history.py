"""Which tensors of a message require grad, by numbers that both ends give them without a word about it in the message.

The number is three times the index of a memory leaf, of a composite plus one, or of a composite in the pickle stream
plus two. A tensor that a composite is made of directly has no number of its own: it is the composite that the user has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_MEMORY, _COMPOSITE, _STREAMED = range(3)


class Sources:
    """The composites of a message, at the sender, that are tensors and require grad."""

    __slots__ = ("_alive", "_composites", "_parts", "_streamed")

    def __init__(self) -> None:
        self._composites: dict[int, torch.Tensor] = {}
        self._streamed: list[torch.Tensor] = []
        self._parts: set[int] = set()
        self._alive: list[Any] = []

    def add_composite(self, index: int, obj: Any, parts: Sequence[Any]) -> None:
        """Note a composite of the tables."""
        if isinstance(obj, torch.Tensor) and obj.requires_grad:
            self._composites[index] = obj
            self._note(parts)

    def add_streamed(self, obj: Any, parts: Sequence[Any]) -> int | None:
        """Note a composite that goes into the pickle stream; returns its index there, None if it needs none."""
        if not isinstance(obj, torch.Tensor) or not obj.requires_grad:
            return None
        self._streamed.append(obj)
        self._note(parts)
        return len(self._streamed) - 1

    def _note(self, parts: Sequence[Any]) -> None:
        # An id that is noted must not be used again.
        self._alive.append(parts)
        self._parts.update(map(id, parts))

    def numbered(self, leaves: Iterable[Any]) -> dict[int, torch.Tensor]:
        """The tensors that require grad by their numbers; ``leaves`` are those of the memory table."""
        found = {
            3 * index + _MEMORY: leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in self._parts
        }
        found.update((3 * index + _COMPOSITE, obj) for index, obj in self._composites.items())
        found.update((3 * index + _STREAMED, obj) for index, obj in enumerate(self._streamed))
        return found


def numbered(
    leaves: Iterable[Any], composites: Iterable[Any] = (), streamed: dict[int, Any] | None = None
) -> dict[int, torch.Tensor]:
    """The same at the receiver, for what was built: only leaves of a graph, as which they all were made."""
    groups = (
        ((3 * index + _MEMORY, obj) for index, obj in enumerate(leaves)),
        ((3 * index + _COMPOSITE, obj) for index, obj in enumerate(composites)),
        ((3 * index + _STREAMED, obj) for index, obj in (streamed or {}).items()),
    )
    # A composite may be one of its own parts, with attributes on it: then the last number holds.
    last = {
        id(obj): (number, obj)
        for group in groups
        for number, obj in group
        if isinstance(obj, torch.Tensor) and obj.requires_grad and obj.is_leaf
    }
    return dict(last.values())
