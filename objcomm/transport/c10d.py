"""The elastic lane: gloo, called without torch's wrappers in between.

What gloo does, and this file lives with:

- A receive may be longer than what is sent; one that is *shorter* ends the whole process. So nothing may ever
  receive on the tag of the data but what agrees with the sender on the sizes.
- A wait that runs out of time closes every connection of this rank in that gloo context, the whole group's,
  for good; each peer sees its own connection closed.
- ``is_completed()`` says nothing before ``wait()``, so each transfer is waited for.
- Where the connection breaks in the middle of a message, who waits for that message, at either end, is not told.
- The end of a transfer can be waited for once; a second wait is for an end that never comes.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ..deadline import Deadline
from ..errors import ObjcommError, PeerError, TransferTimeout
from .base import Both, Pending, messages

# "objc": what users send on the same pair of ranks has another tag, so the two never mix.
TAG = 0x6F626A63
# A receive that nothing is ever sent to; see ElasticLane.close.
_CLOSE_TAG = TAG + 1
_SOON = timedelta(milliseconds=1)
# From this size on it is worth a thread to notice that the connection breaks in the middle of a message.
_WATCHED_BYTES = 4 << 20
_FIRST_LOOK_SECONDS = 0.25
_MAX_LOOK_SECONDS = 4.0
# What has arrived is announced within this time, even if the connection broke right after it.
_SETTLING_SECONDS = 0.5

_SOURCE_LINE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*")
_ADVICE = re.compile(r"\s*This is typically caused by.*$", re.DOTALL)

# Where nothing ever arrives.
_NOWHERE = torch.empty(1, dtype=torch.uint8, device="cpu")

# Why all connections of a gloo backend were closed by this rank, by backend.
_closed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class ElasticLane:
    """Both directions between this rank and one peer over one gloo backend."""

    device = torch.device("cpu")

    def __init__(self, backend: Any, peer_group_rank: int, peer: int) -> None:
        self._backend = backend
        self._peer_group_rank = peer_group_rank
        self._peer = peer

    def send(self, tensor: torch.Tensor) -> Pending:
        """Post one message. It is complete when the peer has posted its receive, however small it is."""
        try:
            work = self._backend.send([tensor], self._peer_group_rank, TAG)
        except RuntimeError as error:
            raise self.translated(error) from error
        return self._transfer(work, tensor)

    def recv(self, tensor: torch.Tensor) -> Pending:
        """Post the receive of one message of at most the length of ``tensor``."""
        try:
            work = self._backend.recv([tensor], self._peer_group_rank, TAG)
        except RuntimeError as error:
            raise self.translated(error) from error
        return self._transfer(work, tensor)

    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        return Both([self.send(piece) for piece in messages(tensors)])

    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        return Both([self.recv(piece) for piece in messages(tensors)])

    def _transfer(self, work: Any, tensor: torch.Tensor) -> _Transfer:
        return (_Watched if tensor.numel() >= _WATCHED_BYTES else _Transfer)(self, work, tensor)

    def close(self) -> None:
        """Close the connection, for both ends at once, by a wait that runs out of time. Never raises."""
        _closed.setdefault(self._backend, f"this rank broke off its transfers with rank {self._peer}")
        try:
            self._backend.recv([_NOWHERE], self._peer_group_rank, _CLOSE_TAG).wait(_SOON)
        except RuntimeError:
            return

    def look(self) -> None:
        """Raise if the connection is known to be broken: nothing can be posted then, not even what never comes."""
        self._backend.recv([_NOWHERE], self._peer_group_rank, _CLOSE_TAG)

    def translated(self, error: RuntimeError, deadline: Deadline | None = None) -> ObjcommError:
        """What gloo's error means."""
        text = str(error)
        if deadline is not None and "Timed out waiting" in text:
            _closed.setdefault(self._backend, f"a transfer with rank {self._peer} ran out of time")
            return TransferTimeout(f"rank {self._peer} did not come within {deadline.seconds:g} s")
        what = _ADVICE.sub("", _SOURCE_LINE.sub("", text.splitlines()[0] if text else repr(error))).rstrip(".: ")
        if "Application timeout" in text:
            why = _closed.get(self._backend, "a transfer on it ran out of time")
            return PeerError(
                f"this rank has closed its gloo connections of this group, for {why}",
                hint="gloo cannot close one without the others; use another group from here on",
            )
        return PeerError(f"the connection to rank {self._peer} is gone: {what}")


class _Transfer:
    """One message. The work object does not own the memory, so this does."""

    __slots__ = ("_error", "_lane", "_memory", "_work")

    def __init__(self, lane: ElasticLane, work: Any, memory: torch.Tensor) -> None:
        self._lane = lane
        self._work = work
        self._memory: torch.Tensor | None = memory
        self._error: ObjcommError | None = None

    def wait(self, deadline: Deadline) -> None:
        work = self._work
        if work is None:
            if self._error is not None:
                raise self._error
            return
        over: list[Any] = []
        try:
            self._await(work, deadline, over)
        except RuntimeError as error:
            self._error = self._lane.translated(error, deadline)
            self._work = None
            raise self._error from error
        finally:
            # Also where a signal was handled as soon as the backend had returned.
            if over:
                self._work = self._memory = None

    def _await(self, work: Any, deadline: Deadline, over: list[Any]) -> None:
        """Wait for the backend, and put something into ``over`` once it is over, with no bytecode in between."""
        over.extend(map(work.wait, (deadline.timedelta(),)))


class _Watched(_Transfer):
    """A large message. A thread waits for the backend, while this one looks after the connection."""

    __slots__ = ()

    def _await(self, work: Any, deadline: Deadline, over: list[Any]) -> None:
        ended = threading.Event()
        failures: list[RuntimeError] = []
        limit = deadline.timedelta()
        # Where nobody tells the backend that it is over, it still has this memory.
        held = [self._memory]

        def wait() -> None:
            try:
                over.append(work.wait(limit))
            except RuntimeError as error:
                failures.append(error)
            held.clear()
            ended.set()

        try:
            threading.Thread(target=wait, name="objcomm-watched", daemon=True).start()
        except RuntimeError:  # no thread can be had any more, as when the interpreter ends
            super()._await(work, deadline, over)
            return
        pause = _FIRST_LOOK_SECONDS
        while not ended.wait(pause):
            try:
                self._lane.look()
            except RuntimeError:
                if not ended.wait(_SETTLING_SECONDS):
                    # The backend has closed its socket, and touches the memory no more.
                    held.clear()
                    raise
            pause = min(_MAX_LOOK_SECONDS, 2 * pause)
        if failures:
            raise failures[0]
