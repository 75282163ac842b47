"""The connection of two ranks of one host: a Unix socket for each direction of data.

Sockets keep the boundaries of records (``SOCK_SEQPACKET``): a record arrives whole or not at all, so nothing that
interrupts a call leaves the other end in the middle of something. On the socket of a direction the data flows one
way and acknowledgements the other, so each end reads one kind of record from each socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence

import torch

from ..deadline import Deadline
from ..errors import ObjcommError, PeerError
from ..hostmemory import view_of
from .local_shared import ranks_here

# Up to here bytes go through the socket, in one record: two copies cost less than a read and an acknowledgement.
RECORD_BYTES = 64 << 10
NOW = int(getattr(socket, "MSG_DONTWAIT", 0)) | int(getattr(socket, "MSG_NOSIGNAL", 0))
# recv_into then returns how long the record was, so that one that does not fit is noticed.
_WHOLE = int(getattr(socket, "MSG_TRUNC", 0))
# Arguments of recv_into, as map() takes them.
_FROM_START = (0,)
_WHOLE_NOW = (_WHOLE | NOW,)
_BUFFER_BYTES = 1 << 20
# A blocked call returns this often, and looks at the time.
SLICE_SECONDS = 1
_TIMEVAL = struct.Struct("@ll")
# How long to try again and again before sleeping: waking up takes 5 to 20 us, and a peer's turn about 50.
_SPIN_SECONDS = 150e-6
_MOST_CREDIT = 16
# After so many waits without a try it is tried again.
_FIRST_PROBE = 16
_LONGEST_PROBE = 1024
_CONTENDED_SECONDS = 250e-6


class TooSmall(Exception):
    """The system does not allow buffers that a record fits into."""


class Gone(Exception):
    """The other end has closed the socket, or does not exist any more."""


def spinning_pays() -> bool:
    """Whether every rank of this host can have a core for itself while it waits."""
    return ranks_here() <= (os.cpu_count() or 1)


def prepare(sock: socket.socket) -> None:
    """Make calls return within a second, and buffers as large as the system allows.

    Raises:
        TooSmall: that is less than a record.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(SLICE_SECONDS, 0))
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if size < 2 * RECORD_BYTES:
        raise TooSmall(f"a socket has {size} bytes of buffer here")


class Reader:
    """Takes records from a socket; one thread at a time."""

    def __init__(self, sock: socket.socket, spins: bool) -> None:
        self._sock = sock
        self._spins = spins
        # Trying before sleeping is for a peer that answers at once: whether it does is learned.
        self._credit = _MOST_CREDIT if spins else 0
        self._asleep = 0
        self._probe_after = _FIRST_PROBE

    def take(self, view: memoryview, deadline: Deadline, got: list[int]) -> bool:
        """Wait for a record, put it into ``view`` and its length into ``got``, with no bytecode in between.

        Returns False if time ran out.

        Raises:
            Gone: the other end is.
        """
        into = (view,)
        recv_into = self._sock.recv_into
        try:
            try:
                got.extend(map(recv_into, into, _FROM_START, _WHOLE_NOW))
            except BlockingIOError:
                if self._spun(into, got):
                    return True
                return self._slept(into, deadline, got)
            return True
        except ConnectionResetError:
            # Told once, before what is still to be read: the other end had something unread when it closed.
            try:
                got.extend(map(recv_into, into, _FROM_START, _WHOLE_NOW))
            except OSError as error:
                raise Gone(str(error)) from None
            return True
        except OSError as error:
            raise Gone(str(error)) from None
        finally:
            if got and got[-1] == 0:
                got.pop()
                raise Gone("it was closed")

    def _spun(self, into: tuple[memoryview], got: list[int]) -> bool:
        if self._credit <= 0:
            self._asleep += 1
            if not self._spins or self._asleep < self._probe_after:
                return False
            self._asleep = 0
        recv_into = self._sock.recv_into
        began = before = time.perf_counter()
        while True:
            # Lets whoever shares the core go on, the other end in particular.
            os.sched_yield()
            now = time.perf_counter()
            if now - before > _CONTENDED_SECONDS:
                # Others want this core, and who sleeps gets it back sooner than who yields.
                self._credit = 0
                self._probe_after = min(_LONGEST_PROBE, 2 * self._probe_after)
                return False
            try:
                got.extend(map(recv_into, into, _FROM_START, _WHOLE_NOW))
            except BlockingIOError:
                if now - began < _SPIN_SECONDS:
                    before = now
                    continue
                self._credit = max(0, self._credit - 4)
                return False
            self._credit = min(_MOST_CREDIT, self._credit + 1)
            self._probe_after = _FIRST_PROBE
            return True

    def _slept(self, into: tuple[memoryview], deadline: Deadline, got: list[int]) -> bool:
        recv_into = self._sock.recv_into
        while True:
            left = deadline.remaining()
            flags = _WHOLE
            if left <= SLICE_SECONDS:
                poll = select.poll()
                poll.register(self._sock, select.POLLIN)
                poll.poll(left * 1000)
                flags |= NOW
            try:
                got.extend(map(recv_into, into, _FROM_START, (flags,)))
                return True
            except BlockingIOError:
                if deadline.expired:
                    return False


class Connection:
    """Both sockets of a pair and why they were closed, if so."""

    def __init__(self, peer: int, outgoing: socket.socket, incoming: socket.socket) -> None:
        self.peer = peer
        self.outgoing = outgoing
        self.incoming = incoming
        self.failure: ObjcommError | None = None
        for sock in (outgoing, incoming):
            weakref.finalize(self, sock.close).atexit = False
        _connections.add(self)

    def fail(self, error: ObjcommError) -> ObjcommError:
        """Close the connection for both ends, at once and for good, and return ``error``."""
        if self.failure is None:
            self.failure = error.kept()
        for sock in (self.outgoing, self.incoming):
            # Not close(): another thread may be waiting in a call with this very number.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return error

    def lost(self, what: object) -> ObjcommError:
        """A socket turned out to be broken: the error for whoever noticed.

        The other socket is left alone: what lies in it came before the end, and is not lost.
        """
        failure = self.failure
        if failure is not None:
            return self.closed_by(failure)
        return PeerError(f"the connection to rank {self.peer} is gone: {what}")

    def closed_by(self, failure: ObjcommError) -> ObjcommError:
        return PeerError(f"the connection to rank {self.peer} is closed since: {failure.text}", hint=failure.hint)

    def check(self) -> None:
        """Raise why the connection is closed, if it is known to be."""
        if self.failure is not None:
            raise self.closed_by(self.failure)


def bytes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, memoryview]]:
    """Tensors that hold something, each with a view of its bytes."""
    return [(tensor, view_of(tensor)) for tensor in tensors if tensor.numel()]


def is_small(tensor: torch.Tensor) -> bool:
    """Whether it may be kept: it holds something, and its memory is no part of something large."""
    return 0 < tensor.untyped_storage().nbytes() <= RECORD_BYTES and tensor.numel() > 0


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child would keep the peer from noticing that this process has ended."""
    for connection in list(_connections):
        connection.failure = PeerError("this process was forked from one that uses the connection")
        connection.outgoing.close()
        connection.incoming.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
