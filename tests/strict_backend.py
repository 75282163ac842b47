"""A torch.distributed backend for CPU tensors that is as strict as NCCL, to find out what a program relies on.

Point-to-point operations of one communicator:

- have no tags: anything but 0 is refused;
- demand equal sizes on both ends; otherwise both ends fail, each naming both sizes, and the pair is dead;
- run in the order in which they were posted: an operation between two ranks starts only when the one posted before it
  between the same two ranks is done, whatever their directions. So "both send, then both receive" never ends;
- are rendezvous: a send is done when the receiver has the bytes, and not before it wants them;
- may be posted as a batch, between ``_start_coalescing`` and ``_end_coalescing``: a batch takes one place in the order, and
  its operations run side by side.

``wait(timeout)`` is honoured, and harms nothing. Importing this module registers the backend as ``"strict"``::

    dist.init_process_group("strict", ...)
    dist.new_group([0, 1], backend="strict", use_local_synchronization=True)
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from objcomm.hostmemory import view_of

_FRAME = struct.Struct("<cQ")
_HELLO = struct.Struct("<cI")
_SEND, _RECV, _DATA = b"S", b"R", b"D"
_POLL_SECONDS = 0.005


class _Operation:
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


class StrictWork(dist.Work):
    """Done when all of its operations are."""

    def __init__(self, rank: int, operations: Sequence[_Operation], timeout: timedelta) -> None:
        super().__init__()
        self._rank = rank
        self._operations = operations
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = self._timeout if timeout is None or timeout <= timedelta(0) else timeout
        end = time.monotonic() + limit.total_seconds()
        for one in self._operations:
            if not one.done.wait(max(0.0, end - time.monotonic())):
                raise RuntimeError(f"strict: timed out after {limit.total_seconds():g} s: {one.text(self._rank)}")
            if one.error is not None:
                raise RuntimeError(f"strict: {one.error}")
        return True

    def is_completed(self) -> bool:
        return all(one.done.is_set() for one in self._operations)


class _Conduit:
    """All that one communicator does between this rank and one peer: a connection and an ordered queue of batches."""

    def __init__(self, rank: int, peer: int, connect: Callable[[_Conduit], socket.socket | None]) -> None:
        self._rank = rank
        self._peer = peer
        self._connect = connect
        self._changed = threading.Condition()
        self._batches: deque[list[_Operation]] = deque()
        self._broken: str | None = None
        self._connection: socket.socket | None = None
        self._is_read = False
        # What has been announced and not been matched with the other end's: operations of mine, sizes of theirs.
        self._mine: dict[bytes, deque[_Operation]] = {_SEND: deque(), _RECV: deque()}
        self._theirs: dict[bytes, deque[int]] = {_SEND: deque(), _RECV: deque()}
        self._to_write: deque[_Operation] = deque()
        self._to_read: deque[_Operation] = deque()
        threading.Thread(target=self._run, name=f"strict-{rank}-{peer}", daemon=True).start()

    def post(self, batch: list[_Operation]) -> None:
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
                # Closing it is left to who reads: a thread must not find another connection under the number of this.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                if not self._is_read:
                    self._connection.close()

    def _run(self) -> None:
        """Take one batch after the other. Once it is broken, what was posted before fails, and what comes after too."""
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

    def _perform(self, batch: list[_Operation], connection: socket.socket) -> None:
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
                    self._broken = (
                        f"sizes differ: rank {sender} sends {sent} bytes, rank {receiver} receives {received} bytes"
                    )
                else:
                    ready.append(one)
        self._changed.notify_all()

    def _read(self, connection: socket.socket) -> None:
        """Take whatever comes, at any time, so that two ends that both write never wait for each other."""
        try:
            while True:
                kind, size = _FRAME.unpack(_exactly(connection, _FRAME.size))
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


def _all_done(batch: list[_Operation]) -> bool:
    return all(one.done.is_set() for one in batch)


def _exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    _fill(connection, memoryview(buffer))
    return bytes(buffer)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the other end is gone")
        view = view[count:]


_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
}


class StrictGroup(dist.ProcessGroup):
    """The process group: a conduit for each peer, and a second one for collectives."""

    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.options = SimpleNamespace(_timeout=timeout)
        self._me = rank
        self._ranks = size
        self._store = store
        self._batch: list[_Operation] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._conduits: dict[tuple[bytes, int], _Conduit] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2 * size)
        store.set(f"strict/{rank}", str(self._listener.getsockname()[1]))
        threading.Thread(target=self._listen, name=f"strict-{rank}-listen", daemon=True).start()

    def getBackendName(self) -> str:
        return "strict"

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        return self._post(tensors, dst, tag, sending=True)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._post(tensors, src, tag, sending=False)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        if self._batch is not None:
            raise RuntimeError("strict: a batch is being posted already")
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        batch, self._batch = self._batch or [], None
        return self._launch(batch)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        root = opts.rootRank
        if self._me == root:
            others = [peer for peer in range(self._ranks) if peer != root]
            self._collect([_Operation(tensor, peer, sending=True) for peer in others for tensor in tensors])
        else:
            self._collect([_Operation(tensor, root, sending=False) for tensor in tensors])
        return self._done()

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            others = [peer for peer in range(self._ranks) if peer != self._me]
            sends = [_Operation(tensor, peer, sending=True) for peer in others]
            self._collect(sends + [_Operation(output[peer], peer, sending=False) for peer in others])
            output[self._me].copy_(tensor)
        return self._done()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        # A ReduceOp holds one of the constants that its class offers.
        operation = dist.ReduceOp.SUM if opts is None else getattr(opts.reduceOp, "op", opts.reduceOp)
        reduce = _REDUCTIONS[operation]
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in range(self._ranks)]
            self.allgather([parts], [tensor])
            tensor.copy_(reduce(torch.stack(parts)))
        return self._done()

    def barrier(self, opts: Any = None) -> dist.Work:
        token = torch.zeros(1, dtype=torch.uint8)
        return self.allgather([[torch.empty_like(token) for _ in range(self._ranks)]], [token])

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
            conduits = list(self._conduits.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for conduit in conduits:
            conduit.break_off("the group was shut down")

    abort = shutdown

    def _post(self, tensors: list[torch.Tensor], peer: int, tag: int, *, sending: bool) -> dist.Work:
        if tag != 0:
            raise ValueError(f"strict: there are no tags, and the tag is {tag}")
        if peer == self._me or not 0 <= peer < self._ranks:
            raise ValueError(f"strict: rank {peer} cannot be the peer of rank {self._me} of {self._ranks}")
        operations = [_Operation(tensor, peer, sending=sending) for tensor in tensors]
        if self._batch is not None:
            self._batch.extend(operations)
            return self._done()
        return self._launch(operations)

    def _launch(self, operations: list[_Operation], channel: bytes = b"p") -> StrictWork:
        by_peer: dict[int, list[_Operation]] = {}
        for one in operations:
            by_peer.setdefault(one.peer, []).append(one)
        for peer, batch in by_peer.items():
            self._conduit(channel, peer).post(batch)
        return StrictWork(self._me, operations, self.options._timeout)

    def _collect(self, operations: list[_Operation]) -> None:
        self._launch(operations, b"c").wait()

    def _done(self) -> StrictWork:
        return StrictWork(self._me, [], self.options._timeout)

    def _conduit(self, channel: bytes, peer: int) -> _Conduit:
        with self._lock:
            if self._closed:
                raise RuntimeError("strict: the group was shut down")
            key = channel, peer
            if key not in self._conduits:
                self._conduits[key] = _Conduit(self._me, peer, lambda conduit: self._connect(conduit, channel, peer))
            return self._conduits[key]

    def _connect(self, conduit: _Conduit, channel: bytes, peer: int) -> socket.socket | None:
        """The higher rank calls the lower one, when it first has something to do with it."""
        if peer > self._me:
            return conduit.wait_for_connection()
        key = f"strict/{peer}"
        while not self._store.check([key]):
            if conduit.broken:
                return None
            time.sleep(_POLL_SECONDS)
        try:
            connection = socket.create_connection(("127.0.0.1", int(self._store.get(key))))
        except OSError:
            return None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(channel, self._me))
        return connection

    def _listen(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel, peer = _HELLO.unpack(_exactly(connection, _HELLO.size))
                self._conduit(channel, peer).accept(connection)


dist.Backend.register_backend("strict", StrictGroup, devices=["cpu"])
