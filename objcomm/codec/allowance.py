"""What rebuilding a message may copy and look at, beyond the bytes that came: a few bytes can ask for much more.

A tensor of a billion elements can be one element that is repeated; and one tensor can be part of a thousand others.
All of it together is limited by ``max_bytes``, as the message itself is.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from ..errors import LimitError


class Allowance:
    """The bytes that are left to a message."""

    __slots__ = ("_left", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._left = self._nbytes = nbytes

    def renew(self) -> None:
        """All are left again: the message is rebuilt once more, to find out where it fails."""
        self._left = self._nbytes

    def spend(self, nbytes: int) -> None:
        """Take note of bytes that are about to be copied or looked at.

        Raises:
            LimitError: there are more than are left.
        """
        self._left -= nbytes
        if self._left < 0:
            raise LimitError("rebuilding this message would copy or look at more than max_bytes")


current: ContextVar[Allowance | None] = ContextVar("objcomm_allowance", default=None)


def spend(nbytes: int) -> None:
    """Take note of bytes that are about to be copied or looked at for the message that is being rebuilt.

    Raises:
        LimitError: there are more than are left to it.
    """
    allowance = current.get()
    if allowance is not None:
        allowance.spend(nbytes)


def spend_on(*tensors: Any) -> None:
    """The same for all elements of tensors."""
    spend(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
