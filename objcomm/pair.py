"""What this rank shares with one peer of one group: the sequence of messages each way, and whether it still holds.

Invariants:
- Messages of a direction are numbered; number n+1 is posted only after every transfer of number n was posted, since
  nothing but the order tells two messages apart.
- Receives that are posted ahead wait in ``posted``; the one window is posted for the first that lacks its head.
- Once ``closed`` is set, nothing is sent or received any more: the order is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import timeline
from .config import settings
from .deadline import Deadline
from .errors import ObjcommError, PeerError, ProtocolError, TransferTimeout
from .hostmemory import Frame, view_of
from .transport import Link, Pending
from .turn import Turn
from .wire import card
from .wire.frame import Terms, agree

if TYPE_CHECKING:
    from .incoming import Incoming
    from .outgoing import Outgoing


_log = logging.getLogger("objcomm")

# Together at most 9 MiB, of a send's 16.
_KEPT_FRAMES = 4
_KEPT_FRAME_BYTES = 9 << 18


_when_closed: list[Callable[[Pair, ObjcommError], None]] = []


def ask_when_closed(call: Callable[[Pair, ObjcommError], None]) -> None:
    """Call ``call`` with every pair that is closed, and why."""
    _when_closed.append(call)


class Pair:
    """The state of one (group, peer); what two threads touch is changed under the lock of its direction."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rank = link.rank
        self.peer = link.peer
        self.closed: ObjcommError | None = None
        self.next_sent = 0
        self.next_received = 0
        self.posted: deque[Incoming] = deque()
        self._frames: dict[int, Frame] = {}
        # By sequence number, all that has not been seen to complete: they own the memory that is still being read.
        self.in_flight: dict[int, Outgoing] = {}
        # Takes the messages of one channel, which may come between any others; see autograd/mailbox.py.
        self.mailbox: Any = None
        self.window = torch.zeros(link.window, dtype=torch.uint8, device="cpu")
        self.window_view = view_of(self.window)
        self._window_pending: Pending | None = None
        self.sending = threading.Lock()
        self.receiving = threading.Lock()
        self.turn = Turn(self.receiving)
        self._queue = threading.Lock()
        self._terms: Terms | None = None
        self.agreed = False
        self.group_name = ""
        # Channel, sequence number and monotonic time of what was over last.
        self.last_sent: tuple[str, int, float] | None = None
        self.last_received: tuple[str, int, float] | None = None

    def terms(self) -> Terms:
        """This rank's terms; its card is published before they are used for the first time and when they change."""
        max_bytes = settings().max_bytes
        terms = self._terms
        if terms is None or terms.max_bytes != max_bytes:
            terms = Terms(self.link.window, max_bytes)
            with self._store_errors():
                if self._terms is None:
                    card.forget(self.link.store, self.rank, self.peer)
                card.publish(self.link.store, self.rank, terms)
            self._terms = terms
        return terms

    def check_agreement(self) -> None:
        """Compare the peer's card with this rank's terms, as soon as the peer has published one: then they agreed.

        Raises:
            ProtocolError: they differ. The pair is closed: the peer will not take what was posted.
        """
        try:
            with self._store_errors():
                theirs = card.terms_of(self.link.store, self.peer)
            if theirs is None:
                return
            agree(self.terms(), theirs)
        except ProtocolError as error:
            raise self.close(error.locate(phase="handshake")) from None
        self.agreed = True

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ObjcommError):
                raise
            raise self.close(
                PeerError(
                    f"the store of the group, which holds its ranks' cards, does not answer: {error}",
                    phase="handshake",
                )
            ) from error

    def message_name(self, sequence: int, *, sending: bool) -> str:
        """The same on both ends: it ties a send to its receive in a trace."""
        src, dst = (self.rank, self.peer) if sending else (self.peer, self.rank)
        return f"{self.group_name}/{src}>{dst}/{sequence}"

    def borrow_frame(self, nbytes: int) -> Frame:
        """Memory for a head of exactly ``nbytes``: one that was used before if there is one.

        Warm memory has no page faults, and on the way of a small message every operation of torch that is saved, the
        making of a tensor among them, counts.
        """
        frame = self._frames.pop(nbytes, None)
        if frame is None:
            frame = Frame.of(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        return frame

    def return_frame(self, frame: Frame) -> None:
        """Nothing reads the frame any more."""
        if frame.nbytes <= _KEPT_FRAME_BYTES:
            if len(self._frames) >= _KEPT_FRAMES:
                self._frames.clear()
            self._frames[frame.nbytes] = frame

    def hold_sending(self, deadline: Deadline) -> None:
        """Take the sending direction, so that the transfers of one message are posted together."""
        if not self.sending.acquire(blocking=False) and not self.sending.acquire(timeout=deadline.remaining()):
            raise self.busy("sending to")
        if self.closed is not None:
            self.sending.release()
            self.check_open()

    def expect(self, incoming: Incoming) -> None:
        """Queue a receive, and post the window at once unless another thread is at work here."""
        self.check_open()
        with self._queue:
            self.posted.append(incoming)
        if self.receiving.acquire(blocking=False):
            try:
                self.post_window()
            finally:
                self.receiving.release()
                self.turn.changed()

    def hold_receiving(self, incoming: Incoming, deadline: Deadline) -> bool:
        """Take the receiving direction: one thread at a time moves the posted receives on.

        Returns whether it was taken; if not, another thread has completed this receive meanwhile.
        A receive that has a handle keeps its place, so that it can be waited for again. One that has none must not
        take a message that nobody would get: it is withdrawn, or the pair is closed if it is too late for that.
        """
        try:
            taken = self.turn.take(lambda: incoming.done, deadline)
        except BaseException:
            self._withdraw(incoming)
            raise
        if taken is not None:
            return taken
        error = TransferTimeout(
            f"nothing arrived from rank {self.peer} in time: another thread waits for it, or for what comes before",
            rank=self.rank,
            peer=self.peer,
            phase="head",
        )
        if not self._withdraw(incoming):
            raise self.refuse(error)
        raise error

    def release_receiving(self) -> None:
        """Give the receiving direction back, with a window posted for a receive that was queued meanwhile."""
        self._post_for_first()
        self.receiving.release()
        self.turn.changed()
        # It may have been queued between the look and the release, by a thread that found the direction taken.
        if self.posted and self._window_pending is None and self.receiving.acquire(blocking=False):
            self._post_for_first()
            self.receiving.release()
            self.turn.changed()

    def _post_for_first(self) -> None:
        if self.posted and self.closed is None:
            try:
                self.post_window()
            except ObjcommError as error:
                _log.debug("a window could not be posted; the receive itself will tell: %s", error)

    def _withdraw(self, incoming: Incoming) -> bool:
        """Whether nothing is lost if nobody waits for this receive now: it has a handle, or is taken back."""
        with self._queue:
            if incoming.has_handle:
                return True
            if incoming.begun:
                return False
            self.posted.remove(incoming)
            return True

    def post_if_idle(self, incoming: Incoming) -> None:
        """Queue a receive unless there is one already; the receiving direction is held."""
        with self._queue:
            if not self.posted:
                self.posted.append(incoming)

    def begin_first(self) -> Incoming:
        """The receive whose turn it is; from now on it can no longer be withdrawn."""
        with self._queue:
            first = self.posted[0]
            first.begun = True
            return first

    def end_first(self) -> None:
        with self._queue:
            self.posted.popleft()
        self.turn.changed()

    def post_window(self) -> None:
        """Post the receive of a head, unless it is posted already."""
        if self._window_pending is None:
            self.terms()
            self._window_pending = self.link.recv_head(self.window)

    def post_ahead(self) -> None:
        """All transfers of the message in hand are posted: the next one may be on its way meanwhile."""
        if len(self.posted) > 1:
            self.post_window()

    def take_window(self, deadline: Deadline) -> None:
        """Wait until the next head, or its beginning, lies in ``window``."""
        self.post_window()
        assert self._window_pending is not None
        self._window_pending.wait(deadline)
        self._window_pending = None

    def check_open(self) -> None:
        """Raise why nothing can be exchanged any more, if so."""
        if self.closed is not None:
            cause = self.closed
            again = ProtocolError if isinstance(cause, ProtocolError) else PeerError
            raise again(
                f"this pair is closed since {type(cause).__name__}: {cause.text}",
                rank=self.rank,
                peer=self.peer,
                hint="use another group from here on: gloo cannot close one connection of a group without the others",
            ) from cause

    def close(self, error: ObjcommError) -> ObjcommError:
        """Nothing more can be exchanged: keep the first reason, and return ``error`` with its place filled in.

        What the peer left in the store as its reason to refuse this rank's messages, if it did, is the better error.
        """
        error = error.locate(rank=self.rank, peer=self.peer)
        if isinstance(error, (PeerError, TransferTimeout)):
            reason = self._refusal()
            if reason is not None:
                error = ProtocolError(
                    f"rank {self.peer} refused a message of this rank and closed the pair: {reason}",
                    rank=self.rank,
                    peer=self.peer,
                    channel=error.channel,
                    phase=error.phase,
                )
        if self.closed is None:
            self.closed = error.kept()
            for asked in _when_closed:
                asked(self, error)
            if timeline.active is not None:
                timeline.instant(self.rank, type(error).__name__, peer=self.peer, text=str(error))
        return error

    def refuse(self, error: ObjcommError) -> ObjcommError:
        """Close the pair because of what the peer sent, and let the peer know why."""
        error = self.close(error)
        try:
            card.refuse(self.link.store, self.rank, self.peer, error.text)
        except RuntimeError:
            pass  # the store is gone with the rank that kept it; the closed connection still tells the peer
        self.link.close()
        return error

    def _refusal(self) -> str | None:
        try:
            return card.refusal(self.link.store, self.rank, self.peer)
        except (RuntimeError, ProtocolError):
            return None

    def busy(self, what: str) -> TransferTimeout:
        return TransferTimeout(
            f"another thread was still {what} rank {self.peer}",
            rank=self.rank,
            peer=self.peer,
            phase="lock",
            hint="threads that talk to one peer take turns; give each its own group to let them overlap",
        )
