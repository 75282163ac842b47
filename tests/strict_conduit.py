"""What one communicator of the strict backend does between two ranks: a connection, and batches in order."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

import torch

from objcomm.hostmemory import view_of

# What goes over a connection: S or R announces an operation and its size, D is followed by that many bytes.
_FRAME = struct.Struct("<cQ")
_SEND, _RECV, _DATA = b"S", b"R", b"D"


class Operation:
    """One send or receive of one tensor."""

    def __init__(self, tensor: torch.Tensor, peer: int, *, sending: bool) -> None:
        if not tensor.is_contiguous():
            raise ValueError("strict: tensors must be contiguous")
        self.tensor = tensor
        self.peer = peer
        self.sending = sending
        # What is not on the CPU goes through a copy there.
        self.host = tensor if tensor.device.type == "cpu" else tensor.cpu()
        self.view = view_of(self.host)
        self.size = len(self.view)
        self.done = threading.Event()
        self.error: str | None = None

    def finish(self, error: str | None = None) -> None:
        if error is None and not self.sending and self.host is not self.tensor:
            self.tensor.copy_(self.host)
        self.error = error
        self.done.set()

    def text(self, me: int) -> str:
        action = f"send {self.size} bytes to" if self.sending else f"receive {self.size} bytes from"
        return f"rank {me} has yet to {action} rank {self.peer}"


class Conduit:
    """What one communicator does between this rank and one peer: a connection, and batches in order."""

    def __init__(self, rank: int, peer: int, connect: Callable[[Conduit], socket.socket | None]) -> None:
        self._rank = rank
        self._peer = peer
        self._connect = connect
        self._changed = threading.Condition()
        self._batches: deque[list[Operation]] = deque()
        self._broken: str | None = None
        self._connection: socket.socket | None = None
        self._is_read = False
        # What has been announced and not been matched with the other end's: operations of mine, sizes of
        # theirs.
        self._mine: dict[bytes, deque[Operation]] = {_SEND: deque(), _RECV: deque()}
        self._theirs: dict[bytes, deque[int]] = {_SEND: deque(), _RECV: deque()}
        self._to_write: deque[Operation] = deque()
        self._to_read: deque[Operation] = deque()
        threading.Thread(target=self._run, name=f"strict-{rank}-{peer}", daemon=True).start()

    def post(self, batch: list[Operation]) -> None:
        with self._changed:
            if self._broken is None:
                self._batches.append(batch)
                self._changed.notify_all()
                return
        for one in batch:
            one.finish(self._broken)

    def accept(self, connection: socket.socket) -> None:
        with self._changed:
            self._connection = connection
            self._changed.notify_all()

    def wait_for_connection(self) -> socket.socket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._connection is not None or self._broken is not None)
            return self._connection

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def break_off(self, reason: str) -> None:
        """Fail everything that is posted and everything that will be."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()
            if self._connection is not None:
                # Closing it is left to who reads: a thread must not find another connection under the number
                # of this.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                if not self._is_read:
                    self._connection.close()

    def _run(self) -> None:
        """Take one batch after the other. Once it is broken, all that was posted fails."""
        connection = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._broken is not None)
                if not self._batches:
                    return
                batch = self._batches.popleft()
            if connection is None and self._broken is None:
                connection = self._open()
            if connection is not None and self._broken is None:
                self._perform(batch, connection)
            for one in batch:
                if not one.done.is_set():
                    one.finish(self._broken)

    def _open(self) -> socket.socket | None:
        connection = self._connect(self)
        if connection is None:
            self.break_off("the group was shut down")
            return None
        with self._changed:
            self._connection = connection
            if self._broken is not None:
                connection.close()
                return None
            self._is_read = True
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()
        return connection

    def _perform(self, batch: list[Operation], connection: socket.socket) -> None:
        """Announce the operations of a batch, then run them as the other end announces its own."""
        try:
            for one in batch:
                kind = _SEND if one.sending else _RECV
                with self._changed:
                    self._mine[kind].append(one)
                    self._match()
                connection.sendall(_FRAME.pack(kind, one.size))
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._to_write or self._broken or _all_done(batch))
                    if self._broken is not None or _all_done(batch):
                        return
                    one = self._to_write.popleft()
                connection.sendall(_FRAME.pack(_DATA, one.size))
                connection.sendall(one.view)
                one.finish()
        except OSError as error:
            self.break_off(f"the connection to rank {self._peer} is closed: {error}")

    def _match(self) -> None:
        """Pair what both ends have announced, first with first. Called with the lock held."""
        for kind, counterpart, ready in ((_SEND, _RECV, self._to_write), (_RECV, _SEND, self._to_read)):
            while self._mine[kind] and self._theirs[counterpart]:
                one, size = self._mine[kind].popleft(), self._theirs[counterpart].popleft()
                if one.size != size:
                    sender, receiver = (self._rank, self._peer) if one.sending else (self._peer, self._rank)
                    sent, received = (one.size, size) if one.sending else (size, one.size)
                    sizes = f"rank {sender} sends {sent} bytes, rank {receiver} receives {received} bytes"
                    self._broken = f"sizes differ: {sizes}"
                else:
                    ready.append(one)
        self._changed.notify_all()

    def _read(self, connection: socket.socket) -> None:
        """Take whatever comes, at any time, so that two ends that both write never wait for each other."""
        try:
            while True:
                kind, size = _FRAME.unpack(exactly(connection, _FRAME.size))
                if kind == _DATA:
                    with self._changed:
                        one = self._to_read.popleft()
                    _fill(connection, one.view)
                    one.finish()
                    with self._changed:
                        self._changed.notify_all()
                else:
                    with self._changed:
                        self._theirs[kind].append(size)
                        self._match()
        except OSError as error:
            self.break_off(f"the connection to rank {self._peer} is closed: {error}")
        finally:
            connection.close()


def _all_done(batch: list[Operation]) -> bool:
    return all(one.done.is_set() for one in batch)


def exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    _fill(connection, memoryview(buffer))
    return bytes(buffer)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the other end is gone")
        view = view[count:]
