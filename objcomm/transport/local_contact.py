"""Making contact with a peer that may be on the same host: first through the group's store, then directly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from ..deadline import Deadline
from ..errors import PeerError
from . import local_connect
from .local_connect import Apart, Both, Ended
from .local_meeting import Meeting, Record, Store, record_of_this_process, why_apart

_FIRST_NAP_SECONDS = 0.0005
_LONGEST_NAP_SECONDS = 0.05
# How often to look whether the peer, which has not made contact, is gone.
_FIRST_LOOK_SECONDS = 0.25
_LONGEST_LOOK_SECONDS = 10.0
# A peer that gives up says so in the store, and closes the connection.
_LAST_WORD_SECONDS = 2.0
_MAX_REASON = 500


class Contact:
    """This end of the contact; ``ranks`` are the global ranks of this process and the peer.

    Args:
        store: gives the store, on a connection in which nobody waits.
        lower: whether this rank is the lower of the two in the group: that one listens.
        name: of the two records in the store.
        allowed: whether this rank takes part at all.
    """

    def __init__(
        self, store: Callable[[], Store], name: str, ranks: tuple[int, int], *, lower: bool, allowed: bool
    ) -> None:
        self._ranks = ranks
        self._lower = lower
        self._meeting = Meeting(store, name, 0 if lower else 1, record_of_this_process(allowed))
        self._listener: socket.socket | None = None
        # Set once nobody waits for the contact any more.
        self.stopped = threading.Event()

    @property
    def why_not(self) -> str:
        """Why this rank takes no part, if so."""
        why_not = self._meeting.mine.why_not
        return f"on rank {self._ranks[0]}: {why_not}" if why_not else ""

    def decline(self) -> None:
        """Tell the peer that this rank takes no part.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._meeting.publish()

    def make(self, check_wanted: Callable[[], None], look_at_peer: Callable[[], None]) -> Both:
        """Wait for the peer, and connect.

        Args:
            check_wanted: raises if nobody waits any more. Asked all the time.
            look_at_peer: raises if the peer is known to be gone. Asked now and then.

        Raises:
            Apart: there is no direct way; the peer knows it too.
            PeerError: the peer is gone, or has closed the connection.
            RuntimeError: the store does not answer.
        """
        try:
            self._listen()
            patience = _Patience(check_wanted, look_at_peer)
            theirs = self._meet(patience)
            made = self._connect(theirs, patience)
        finally:
            self.stop_listening()
        self._meeting.forget()
        return made

    def leave(self, reason: str) -> bool:
        """Tell a peer that comes later, or has come already, that nobody is here any more.

        Returns whether it may have chosen the process group already, and wait there.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            self._meeting.publish(gave_up=reason[:_MAX_REASON], closed=True)
            theirs = self._meeting.look()
            return theirs is not None and bool(self._why_apart(theirs))
        return False

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self) -> None:
        """Before the record is published: the peer may connect as soon as it has read that."""
        if self._lower:
            try:
                self._listener = local_connect.listen(self._meeting.mine.token)
            except OSError as error:
                self._meeting.publish(why_not=f"no Unix socket can be had: {error}")
                raise Apart(self.why_not) from error
        self._meeting.publish()

    def _meet(self, patience: _Patience) -> Record:
        """The peer's record.

        By asking the store again and again, since one that waits serves nobody else meanwhile.
        """
        nap = _FIRST_NAP_SECONDS
        while (theirs := self._meeting.meet()) is None:
            patience.keep_on()
            self.stopped.wait(nap)
            nap = min(_LONGEST_NAP_SECONDS, nap * 1.5)
        self._obey(theirs)
        apart = self._why_apart(theirs)
        if apart:
            self._meeting.forget()
            raise Apart(apart)
        return theirs

    def _connect(self, theirs: Record, patience: _Patience) -> Both:
        def keep_on() -> None:
            patience.keep_on()
            now = self._meeting.look()
            if now is not None and now.saw == self._meeting.mine.token:
                self._obey(now)

        mine, peer = self._meeting.mine, self._ranks[1]
        try:
            if self._listener is not None:
                return local_connect.join_as_listener(self._listener, mine, theirs, peer, keep_on)
            made = local_connect.connect(theirs.token)
            return local_connect.join_as_connector(made, mine, theirs, peer, keep_on)
        except Apart as apart:
            self._meeting.publish(gave_up=str(apart)[:_MAX_REASON])
            raise
        except Ended:
            self._hear_last_word()

    def _why_apart(self, theirs: Record) -> str:
        mine, (rank, peer) = self._meeting.mine, self._ranks
        return why_apart(mine, theirs, rank, peer) if self._lower else why_apart(theirs, mine, peer, rank)

    def _obey(self, theirs: Record | None) -> None:
        """What the peer's record says about giving up."""
        if theirs is not None and theirs.gave_up:
            if theirs.closed:
                raise PeerError(f"rank {self._ranks[1]} has closed the connection: {theirs.gave_up}")
            raise Apart(theirs.gave_up)

    def _hear_last_word(self) -> NoReturn:
        deadline = Deadline(_LAST_WORD_SECONDS)
        while not deadline.expired:
            self._obey(self._meeting.look())
            time.sleep(_LONGEST_NAP_SECONDS)
        raise PeerError(f"the connection to rank {self._ranks[1]} is gone: it was closed while it was being made")


class _Patience:
    """While nothing comes: whether to go on waiting, asked as often as each answer is worth."""

    def __init__(self, check_wanted: Callable[[], None], look_at_peer: Callable[[], None]) -> None:
        self._check_wanted = check_wanted
        self._look_at_peer = look_at_peer
        self._pause = _FIRST_LOOK_SECONDS
        self._next_look = time.monotonic() + self._pause

    def keep_on(self) -> None:
        self._check_wanted()
        if time.monotonic() > self._next_look:
            self._look_at_peer()
            self._pause = min(_LONGEST_LOOK_SECONDS, 2 * self._pause)
            self._next_look = time.monotonic() + self._pause
