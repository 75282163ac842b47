"""What the layers above see of a transport: a link to one peer, and handles of what is in flight on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ..deadline import Deadline
from ..errors import ObjcommError

# A single message above 2 GiB stalls on some backends; both ends cut a segment in the same places.
MAX_MESSAGE_BYTES = 1 << 30


class Pending(Protocol):
    """A transfer that is posted. It keeps alive the memory that it reads or fills, until it is over."""

    def wait(self, deadline: Deadline) -> None:
        """Block until it is over, without holding the interpreter lock. May be called again.

        On an accelerator "over" means: over for whatever is put on the current stream from now on.

        Raises:
            TransferTimeout: the other end did not come in time. The link is closed.
            PeerError: the other end is gone, or the link was closed before.
        """


class Link(Protocol):
    """Everything between this rank and one peer of one group. Bytes arrive in the order of posting.

    Attributes:
        rank, peer: global ranks.
        window: bytes of the first message of a head.
        exact: sizes on both ends must be equal, so the window is sent padded.
        measured: a transfer of which less arrives than is due is noticed. gloo does not say how much has arrived.
        timeout: the group's, in seconds.
        store: the group's.
        alive: the group has not been destroyed.
        can_say_goodbye: a small head that is posted goes out at once if the peer waits for one, though nobody
            here waits for it to go.
    """

    @property
    def rank(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def measured(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    @property
    def store(self) -> dist.Store: ...
    @property
    def alive(self) -> bool: ...
    @property
    def can_say_goodbye(self) -> bool: ...

    def send_head(self, tensor: torch.Tensor) -> Pending:
        """Post a send of ``tensor``, flat uint8 on the CPU: the window or the rest of a head."""

    def recv_head(self, tensor: torch.Tensor) -> Pending:
        """Post a receive into ``tensor``, flat uint8 on the CPU; unless ``exact``, less may come."""

    def send_segments(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """Post sends of flat uint8 tensors, wherever they live, in this order."""

    def recv_segments(self, tensors: Sequence[torch.Tensor], accelerator: Sequence[bool]) -> Pending:
        """Post receives into flat uint8 tensors of exactly the sizes sent, wherever they live.

        ``accelerator`` says of each whether the *sender's* memory is on an accelerator: it decides which way
        it comes.
        """

    def allocate(self, nbytes: int, accelerator: bool, device: torch.device | None) -> torch.Tensor:
        """Flat uint8 memory on ``device``; if that is ``None``, on the CPU, or on this rank's accelerator if
        the sender's memory is on one (``accelerator``).
        """

    def close(self) -> None:
        """Make every transfer of this link fail, on both ends where the backend can do that. Never raises."""


class Both:
    """Several transfers waited for as one."""

    __slots__ = ("_pendings",)

    def __init__(self, pendings: Sequence[Pending]) -> None:
        self._pendings = pendings

    def wait(self, deadline: Deadline) -> None:
        for pending in self._pendings:
            pending.wait(deadline)


class Failed:
    """A transfer that could not be posted: its error belongs to whoever waits."""

    __slots__ = ("_error",)

    def __init__(self, error: ObjcommError) -> None:
        self._error = error

    def wait(self, deadline: Deadline) -> None:
        raise self._error


def message_count(nbytes: int) -> int:
    """How many messages a segment of ``nbytes`` is.

    >>> message_count(0), message_count(1 << 30), message_count((1 << 30) + 1)
    (1, 1, 2)
    """
    return max(1, -(-nbytes // MAX_MESSAGE_BYTES))


def messages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes as tensors of at most one message each."""
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() <= MAX_MESSAGE_BYTES:
            pieces.append(tensor)
        else:
            starts = range(0, tensor.numel(), MAX_MESSAGE_BYTES)
            pieces.extend(tensor[start : start + MAX_MESSAGE_BYTES] for start in starts)
    return pieces
