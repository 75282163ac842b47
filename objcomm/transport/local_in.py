"""What this rank receives from a peer of the same host: see local_out for what is on the socket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..deadline import Deadline
from ..errors import ObjcommError, PeerError, TransferTimeout
from ..hostmemory import view_of
from . import local_memory
from .base import Pending
from .local_out import BLOCKING, COUNT, NOT_BLOCKING, OVER, PLACE, TURN_SECONDS
from .local_outbox import Outbox
from .local_socket import RECORD_BYTES, Connection, Gone, Reader, bytes_of, is_small


class Inbound:
    """The direction from the peer to this rank. Receives are served in the order of posting, whoever waits."""

    def __init__(self, connection: Connection, *, pid: int, reads: bool, spins: bool, threads: int = 1) -> None:
        self._connection = connection
        self._pid = pid
        self._reads = reads
        self._threads = threads
        self._reader = Reader(connection.incoming, spins)
        self._outbox = Outbox(connection, connection.incoming)
        self._reading = threading.Lock()
        self._posted: deque[_Arriving] = deque()
        self._places: deque[tuple[Any, ...]] = deque()
        self._scratch = memoryview(bytearray(RECORD_BYTES))
        self._got: list[int] = []
        self._read = 0
        self._last: tuple[torch.Tensor | None, memoryview] = (None, memoryview(b""))

    def recv(self, tensor: torch.Tensor) -> Pending:
        """Post the receive of one transfer of at most the length of ``tensor``, flat uint8 on the CPU."""
        last, view = self._last
        if last is not tensor:
            view = view_of(tensor)
            if is_small(tensor):
                self._last = (tensor, view)
            elif not view:
                return OVER
        connection = self._connection
        if connection.failure is not None:
            connection.check()
        arriving = _Arriving(self, [(tensor, view)], False)
        self._posted.append(arriving)
        return arriving

    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """Post receives of exactly the lengths of ``tensors``."""
        self._connection.check()
        targets = bytes_of(tensors)
        if not targets:
            return OVER
        arriving = _Arriving(self, targets, True)
        self._posted.append(arriving)
        return arriving

    def serve(self, wanted: _Arriving, deadline: Deadline) -> None:
        """Move receives on until ``wanted`` is over."""
        reading = self._reading
        while not wanted.over:
            # Kept by the very call that takes the lock, so that no signal can come between the two.
            held: list[bool] = []
            try:
                held.extend(map(reading.acquire, NOT_BLOCKING))
                if not held[-1]:
                    held.extend(map(reading.acquire, BLOCKING, (min(deadline.remaining(), TURN_SECONDS),)))
                while held[-1] and not wanted.over:
                    self._serve_first(deadline)
            finally:
                if held and held[-1]:
                    reading.release()
            if not held[-1] and deadline.expired:
                raise self._connection.fail(self._too_late(deadline))

    def _serve_first(self, deadline: Deadline) -> None:
        first = self._posted[0]
        try:
            if self._connection.failure is not None:
                self._connection.check()
            while first.filled < len(first.targets):
                tensor, view = first.targets[first.filled]
                if len(view) <= RECORD_BYTES or not self._reads:
                    self._stream(first, view, deadline)
                else:
                    self._fetch(first, tensor, view, deadline)
            if first.pulled:
                self._acknowledge()
        except ObjcommError as error:
            first.error = error
        # An interrupt lets it be served again, which does nothing twice.
        first.over = True
        first.targets = []
        self._posted.popleft()

    def _acknowledge(self) -> None:
        """Tell the peer how much was read.

        While it can be told it has not let go of its memory, so what was read is what was sent.
        """
        with self._outbox.lock:
            queued = self._outbox.put(COUNT.pack(self._read), None)
        if queued and self._outbox.hung_up():
            raise self._connection.lost("it was closed while its memory was being read")

    def _stream(self, arriving: _Arriving, view: memoryview, deadline: Deadline, *, announced: bool = False) -> None:
        """Take one record into ``view``, or into what is due of it.

        A signal may be handled after any call. So what has come stays in ``_got`` until its effect is stored, and what
        is stored is stored without a call in between.
        """
        whole, streamed, got = len(view), arriving.streamed, self._got
        due = view if whole <= RECORD_BYTES else view[streamed : streamed + RECORD_BYTES]
        if not got:
            self._await(due, deadline)
        nbytes, most = got[0], len(due)
        if nbytes != most and (nbytes > most or arriving.exact or whole > RECORD_BYTES):
            raise self._connection.fail(
                PeerError(f"rank {self._connection.peer} sent {nbytes} bytes where {most} were due")
            )
        if whole <= RECORD_BYTES or streamed + nbytes == whole:
            arriving.streamed = 0
            arriving.filled += 1
            if announced:
                del self._places[0]
        else:
            arriving.streamed = streamed + nbytes
        del got[:]

    def _fetch(self, arriving: _Arriving, tensor: torch.Tensor, view: memoryview, deadline: Deadline) -> None:
        """Take a transfer that the peer announces: from its memory, or from the records that follow."""
        if not self._places:
            self._take_places(deadline)
        address, nbytes = self._places[0]
        if nbytes != len(view):
            raise self._connection.fail(
                PeerError(f"rank {self._connection.peer} offered {nbytes} bytes where {len(view)} were due")
            )
        if not address:
            self._stream(arriving, view, deadline, announced=True)
            return
        self._read_memory(address, tensor.data_ptr(), nbytes, deadline)
        # As in _stream: no call in between.
        self._read += 1
        arriving.pulled = True
        arriving.filled += 1
        del self._places[0]

    def _take_places(self, deadline: Deadline) -> None:
        got = self._got
        if not got:
            self._await(self._scratch, deadline)
        record = self._scratch[: min(got[0], RECORD_BYTES)]
        whole = len(record) // PLACE.size * PLACE.size
        places = deque(PLACE.iter_unpack(record[:whole])) or deque([(0, 0)])
        self._places = places
        del got[:]

    def _read_memory(self, address: int, into: int, nbytes: int, deadline: Deadline) -> None:
        connection = self._connection

        def keep_on() -> None:
            connection.check()
            if deadline.expired:
                raise connection.fail(self._too_late(deadline))

        try:
            local_memory.read(self._pid, address, into, nbytes, keep_on, threads=self._threads)
        except OSError as error:
            what = f"the memory of rank {connection.peer} cannot be read, which it may have lost: {error}"
            raise connection.fail(PeerError(what)) from None

    def _await(self, view: memoryview, deadline: Deadline) -> None:
        try:
            if self._reader.take(view, deadline, self._got):
                return
        except Gone as error:
            raise self._connection.lost(error) from None
        raise self._connection.fail(self._too_late(deadline))

    def _too_late(self, deadline: Deadline) -> TransferTimeout:
        return TransferTimeout(f"rank {self._connection.peer} did not come within {deadline.seconds:g} s")


class _Arriving:
    """Receives posted together. Keeps alive the memory that they fill."""

    __slots__ = ("_inbound", "error", "exact", "filled", "over", "pulled", "streamed", "targets")

    def __init__(self, inbound: Inbound, targets: list[tuple[torch.Tensor, memoryview]], exact: bool) -> None:
        self._inbound = inbound
        self.targets = targets
        self.exact = exact
        self.filled = 0
        self.streamed = 0
        self.pulled = False
        self.over = False
        self.error: ObjcommError | None = None

    def wait(self, deadline: Deadline) -> None:
        if not self.over:
            self._inbound.serve(self, deadline)
        if self.error is not None:
            raise self.error
