"""What rebuilding a message may copy and look at, beyond the bytes that came: a few bytes can ask for much more.

A tensor of a billion elements can be one element that is repeated; and one tensor can be part of a thousand others.
All of it together is limited by ``max_bytes``, as the message itself is.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Spender(Protocol):
    """Who rebuilds a message."""

    def spend(self, nbytes: int) -> None:
        """Take note of bytes that are about to be copied or looked at.

        Raises:
            LimitError: there are more than are left to the message.
        """


current: ContextVar[Spender | None] = ContextVar("objcomm_spender", default=None)


def spend(nbytes: int) -> None:
    """The same for the message that is being rebuilt by this thread."""
    spender = current.get()
    if spender is not None:
        spender.spend(nbytes)


def spend_on(*tensors: Any) -> None:
    """The same for all elements of tensors."""
    spend(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
