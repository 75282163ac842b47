"""Records on their way into a socket, without anybody waiting for room in it."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque

from ..deadline import Deadline
from ..errors import ObjcommError, PeerError
from .local_socket import NOW, SLICE_SECONDS, Connection


class Outbox:
    """Puts records on a socket in their order, without ever making the caller wait.

    What does not fit into the socket's buffer is kept, and a thread goes on with it.
    """

    def __init__(self, connection: Connection, sock: socket.socket) -> None:
        self._connection = connection
        self._sock = sock
        self.lock = threading.Lock()
        self._waiting: deque[tuple[memoryview, object]] = deque()
        self._accepted = 0
        self._flushed = 0
        # Of each thread that waits, a lock that it cannot take before something has moved. (A Condition is written in
        # Python: a signal between its lock and the code under it would leave the lock taken for ever.)
        self._gates: list[threading.Lock] = []
        self._pumping = False
        self._broken: ObjcommError | None = None

    def put(self, record: memoryview | bytes, owner: object) -> int:
        """Hand over a record, whose memory ``owner`` keeps. The lock is held.

        Returns 0 if it has left, else a number for :meth:`wait`.
        """
        if not self._waiting:
            try:
                self._sock.send(record, NOW)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._connection.lost(error) from None
            else:
                return 0
        self._check()
        self._waiting.append((memoryview(record), owner))
        self._accepted += 1
        if not self._pumping:
            self._pumping = True
            name = f"objcomm-local-to-{self._connection.peer}"
            try:
                threading.Thread(target=self._pump, name=name, daemon=True).start()
            except RuntimeError as error:
                # The interpreter ends, or there are too many threads: nobody would go on with it.
                raise self._connection.fail(PeerError(f"no thread can be had to send: {error}")) from error
        return self._accepted

    def wait(self, number: int, deadline: Deadline) -> bool:
        """Wait until the record of this number has left. False if time ran out.

        Raises:
            PeerError: the connection is closed.
        """
        while self._flushed < number:
            gate = threading.Lock()
            gate.acquire()
            with self.lock:
                if self._flushed >= number:
                    break
                self._check()
                self._gates.append(gate)
            if not gate.acquire(timeout=deadline.remaining()) and self._flushed < number:
                return False
        return True

    def _check(self) -> None:
        self._connection.check()
        if self._broken is not None:
            raise PeerError(self._broken.text, hint=self._broken.hint)

    def hung_up(self) -> bool:
        """Whether the other end has closed the socket."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.lock:
            self._open_gates()

    def _open_gates(self) -> None:
        gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def _pump(self) -> None:
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLOUT)
            while True:
                poll.poll(SLICE_SECONDS * 1000)
                with self.lock:
                    self._connection.check()
                    if self._push():
                        return
        except (OSError, ValueError, ObjcommError) as error:
            with self.lock:
                self._broken = self._connection.lost(error)
                self._waiting.clear()
                self._open_gates()

    def _push(self) -> bool:
        """Put as many records as fit. True if none is left, and so the thread ends."""
        before = self._flushed
        try:
            while self._waiting:
                self._sock.send(self._waiting[0][0], NOW)
                self._waiting.popleft()
                self._flushed += 1
            self._pumping = False
            return True
        except BlockingIOError:
            return False
        finally:
            if self._flushed != before:
                self._open_gates()
