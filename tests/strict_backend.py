"""A torch.distributed backend for CPU tensors that is as strict as NCCL, to show what a program relies on.

Point-to-point operations of one communicator:

- have no tags: anything but 0 is refused;
- demand equal sizes on both ends; otherwise both ends fail, each naming both sizes, and the pair is dead;
- run in the order in which they were posted: an operation between two ranks starts only when the one posted
  before it between the same two ranks is done, whatever their directions. So "both send, then both receive"
  never ends;
- are rendezvous: a send is done when the receiver has the bytes, and not before it wants them;
- may be posted as a batch, between ``_start_coalescing`` and ``_end_coalescing``: a batch takes one place in
  the order, and its operations run side by side.

``wait(timeout)`` is honoured, and harms nothing. Importing this module registers the backend as
``"strict"``::

    dist.init_process_group("strict", ...)
    dist.new_group([0, 1], backend="strict", use_local_synchronization=True)
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.strict_conduit import Conduit, Operation, exactly

_HELLO = struct.Struct("<cI")
_POLL_SECONDS = 0.005


class StrictWork(dist.Work):
    """Done when all of its operations are."""

    def __init__(self, rank: int, operations: Sequence[Operation], timeout: timedelta) -> None:
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


_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
}


class StrictGroup(dist.ProcessGroup):
    """The process group: a conduit for each peer, and a second one for collectives."""

    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = SimpleNamespace(_timeout=timeout)
        self._me = rank
        self._ranks = size
        self._store = store
        self._batch: list[Operation] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._conduits: dict[tuple[bytes, int], Conduit] = {}
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

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        if self._me == root:
            others = [peer for peer in range(self._ranks) if peer != root]
            self._collect([Operation(tensor, peer, sending=True) for peer in others for tensor in tensors])
        else:
            self._collect([Operation(tensor, root, sending=False) for tensor in tensors])
        return self._done()

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            others = [peer for peer in range(self._ranks) if peer != self._me]
            sends = [Operation(tensor, peer, sending=True) for peer in others]
            self._collect(sends + [Operation(output[peer], peer, sending=False) for peer in others])
            output[self._me].copy_(tensor)
        return self._done()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
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
        operations = [Operation(tensor, peer, sending=sending) for tensor in tensors]
        if self._batch is not None:
            self._batch.extend(operations)
            return self._done()
        return self._launch(operations)

    def _launch(self, operations: list[Operation], channel: bytes = b"p") -> StrictWork:
        by_peer: dict[int, list[Operation]] = {}
        for one in operations:
            by_peer.setdefault(one.peer, []).append(one)
        for peer, batch in by_peer.items():
            self._conduit(channel, peer).post(batch)
        return StrictWork(self._me, operations, self.options._timeout)

    def _collect(self, operations: list[Operation]) -> None:
        self._launch(operations, b"c").wait()

    def _done(self) -> StrictWork:
        return StrictWork(self._me, [], self.options._timeout)

    def _conduit(self, channel: bytes, peer: int) -> Conduit:
        with self._lock:
            if self._closed:
                raise RuntimeError("strict: the group was shut down")
            key = channel, peer
            if key not in self._conduits:
                self._conduits[key] = Conduit(self._me, peer, lambda conduit: self._connect(conduit, channel, peer))
            return self._conduits[key]

    def _connect(self, conduit: Conduit, channel: bytes, peer: int) -> socket.socket | None:
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
                channel, peer = _HELLO.unpack(exactly(connection, _HELLO.size))
                self._conduit(channel, peer).accept(connection)


dist.Backend.register_backend("strict", StrictGroup, devices=["cpu"])
