"""What this rank sends to a peer of the same host.

A transfer of up to ``RECORD_BYTES`` is one record: its memory is free as soon as the record is in the socket. Of a
longer one the peer gets address and length, reads the memory itself, and acknowledges with the number of transfers
that it has read so far; where it cannot read, the bytes follow in records.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import torch

from ..deadline import Deadline
from ..errors import ObjcommError, TransferTimeout
from ..hostmemory import view_of
from . import local_memory
from .base import Pending
from .local_outbox import Outbox
from .local_socket import RECORD_BYTES, Connection, Gone, Reader, bytes_of, is_small

PLACE = struct.Struct("<QQ")  # address and length of a transfer in the sender's memory
COUNT = struct.Struct("<Q")  # transfers that were read since the beginning
PLACES_PER_RECORD = RECORD_BYTES // PLACE.size
# How soon a thread looks whether another one has brought what it waits for.
TURN_SECONDS = 0.005
# Arguments of a lock's acquire(), as map() takes them.
NOT_BLOCKING = (False,)
BLOCKING = (True,)


class Over:
    """A transfer that is over already."""

    __slots__ = ()

    def wait(self, deadline: Deadline) -> None:
        return


OVER = Over()


class Outbound:
    """The direction from this rank to the peer."""

    def __init__(self, connection: Connection, *, is_read: bool, spins: bool) -> None:
        self._connection = connection
        self._outbox = Outbox(connection, connection.outgoing)
        self._reader = Reader(connection.outgoing, spins)
        self._reading = threading.Lock()
        self._is_read = is_read
        self._offered = 0
        self._acknowledgement = memoryview(bytearray(COUNT.size))
        # The memory of a head is used again and again.
        self._last: tuple[torch.Tensor | None, memoryview] = (None, memoryview(b""))

    def send(self, tensor: torch.Tensor) -> Pending:
        """Post one transfer of a CPU tensor, flat uint8."""
        last, view = self._last
        if last is not tensor:
            if not 0 < tensor.numel() <= RECORD_BYTES:
                return self.send_all([tensor])
            view = view_of(tensor)
            if is_small(tensor):
                self._last = (tensor, view)
        with self._outbox.lock:
            number = self._outbox.put(view, tensor)
        return _Leaving(self, number, 0, [tensor]) if number else OVER

    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        """Post several."""
        number = offered = 0
        places: list[bytes] = []
        with self._outbox.lock:
            for tensor, view in bytes_of(tensors):
                if len(view) > RECORD_BYTES and self._is_read:
                    address = tensor.data_ptr()
                    if local_memory.readable(address, len(view)):
                        places.append(PLACE.pack(address, len(view)))
                        offered += 1
                        continue
                    places.append(PLACE.pack(0, len(view)))
                number = self._offer(places) or number
                for start in range(0, len(view), RECORD_BYTES):
                    number = self._outbox.put(view[start : start + RECORD_BYTES], tensor) or number
            number = self._offer(places) or number
            if not number and not offered:
                return OVER
            self._offered += offered
            return _Leaving(self, number, self._offered if offered else 0, list(tensors))

    def _offer(self, places: list[bytes]) -> int:
        """Tell the peer where transfers lie."""
        number = 0
        while places:
            now, places[:PLACES_PER_RECORD] = places[:PLACES_PER_RECORD], []
            number = self._outbox.put(b"".join(now), None) or number
        return number

    def finish(self, number: int, offered: int, deadline: Deadline) -> None:
        """Wait until a record has left, and so many transfers were read."""
        if number and not self._outbox.wait(number, deadline):
            raise self._too_late(deadline)
        reading = self._reading
        while self._acknowledged() < offered:
            # Kept by the very call that takes the lock, so that no signal can come between the two.
            held: list[bool] = []
            try:
                held.extend(map(reading.acquire, NOT_BLOCKING))
                if not held[-1]:
                    held.extend(map(reading.acquire, BLOCKING, (min(deadline.remaining(), TURN_SECONDS),)))
                if held[-1] and self._acknowledged() < offered and not self._take_acknowledgement(deadline):
                    raise self._too_late(deadline)
            finally:
                if held and held[-1]:
                    reading.release()
            if not held[-1] and deadline.expired:
                raise self._too_late(deadline)

    def _acknowledged(self) -> int:
        """How many transfers were read: the last acknowledgement says it of all before."""
        count: int = COUNT.unpack(self._acknowledgement)[0]
        return count

    def _take_acknowledgement(self, deadline: Deadline) -> bool:
        try:
            return self._reader.take(self._acknowledgement, deadline, [])
        except Gone as error:
            raise self._connection.lost(error) from None

    def _too_late(self, deadline: Deadline) -> ObjcommError:
        peer = self._connection.peer
        error = self._connection.fail(TransferTimeout(f"rank {peer} did not come within {deadline.seconds:g} s"))
        self._outbox.wake()
        return error


class _Leaving:
    """Transfers whose memory is still needed; it is kept here."""

    __slots__ = ("_error", "_memory", "_number", "_offered", "_outbound")

    def __init__(self, outbound: Outbound, number: int, offered: int, memory: list[torch.Tensor]) -> None:
        self._outbound: Outbound | None = outbound
        self._number = number
        self._offered = offered
        self._memory = memory
        self._error: ObjcommError | None = None

    def wait(self, deadline: Deadline) -> None:
        if self._error is not None:
            raise self._error
        outbound = self._outbound
        if outbound is None:
            return
        try:
            outbound.finish(self._number, self._offered, deadline)
        except ObjcommError as error:
            self._error = error
            raise
        self._outbound = None
        self._memory = []
