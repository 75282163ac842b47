"""Connecting two ranks of one host, and making sure that each talks to the process that it means.

The lower rank listens under a random name that only the group's store tells. Who is at the other end, its pid and
its user, is what the kernel says (``SO_PEERCRED``), whatever is claimed. A pid means something in one namespace only
and is used again, so each end reads the other's token, known from the store, out of the memory of that process; if it
reads anything else, or nothing, the bytes go over the socket instead. Nothing is exchanged with another user.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import local_memory
from .local_in import Inbound
from .local_meeting import VERSION, Record
from .local_out import Outbound
from .local_shared import threads_for_copies
from .local_socket import NOW, Connection, TooSmall, prepare, spinning_pays

_HELLO = struct.Struct("<8sII16sQ")  # magic, version, direction, token, where the token is in memory
_MAGIC = b"OBJCLOCL"
_RESULT_BYTES = 1024
_LOOK_SECONDS = 0.02
# A stranger that connects and says nothing is not waited for longer.
_HELLO_SECONDS = 2.0
_CREDENTIALS = struct.Struct("3i")

KeepOn = Callable[[], None]


class Apart(Exception):
    """These two cannot talk directly, although it looked as if they could. The other end has to be told."""


class Ended(Exception):
    """The other end has closed the connection before it was ready: it says in the store why, or is no more."""


class Both(NamedTuple):
    """Both directions, ready to use, and in words how bytes travel."""

    connection: Connection
    out: Outbound
    into: Inbound
    how: str


def listen(token: str) -> socket.socket:
    """A socket that the peer can find.

    Raises:
        OSError: no socket can be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A name in the abstract namespace: no file that could be left behind.
        sock.bind(f"\0objcomm-{token}")
        sock.listen(8)
    except OSError:
        sock.close()
        raise
    return sock


def connect(token: str) -> list[socket.socket]:
    """Two connections to the peer that listens under its token.

    Raises:
        Apart: there is no way to it.
    """
    made: list[socket.socket] = []
    try:
        for _ in range(2):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            made.append(sock)
            sock.connect(f"\0objcomm-{token}")
            _check_user(sock)
    except (OSError, Apart) as error:
        _close(made)
        raise Apart(f"no connection within this host: {error}") from error
    return made


def join_as_listener(listener: socket.socket, mine: Record, theirs: Record, peer: int, keep_on: KeepOn) -> Both:
    """Wait for the peer to connect, and agree with it how bytes travel.

    ``keep_on`` is called again and again while nothing comes, and ends it by raising.
    """
    by_direction: dict[int, tuple[socket.socket, int]] = {}
    try:
        while len(by_direction) < 2:
            if not _readable(listener, _LOOK_SECONDS):
                keep_on()
                continue
            try:
                sock, _ = listener.accept()
            except OSError as error:
                raise Apart(f"no connection within this host: {error}") from error
            hello = _hear(sock, theirs, _HELLO_SECONDS, keep_on)
            if hello is None or hello[0] in by_direction:
                sock.close()  # some stranger
                continue
            by_direction[hello[0]] = (sock, hello[1])
            _check_user(sock)
        with _Secret(mine) as secret:
            for direction, (sock, _) in by_direction.items():
                _tell(sock, secret.hello(direction))
            (out, address), (into, _) = by_direction[0], by_direction[1]
            return _agree(out, into, address, theirs, peer, keep_on)
    except BaseException:
        _close(sock for sock, _ in by_direction.values())
        raise


def join_as_connector(made: list[socket.socket], mine: Record, theirs: Record, peer: int, keep_on: KeepOn) -> Both:
    """The same at the end that has connected."""
    try:
        with _Secret(mine) as secret:
            address = 0
            for direction, sock in enumerate(made):
                _tell(sock, secret.hello(direction))
            for sock in made:
                hello = _hear(sock, theirs, None, keep_on)
                if hello is None:
                    raise Ended
                address = hello[1]
            into, out = made
            return _agree(out, into, address, theirs, peer, keep_on)
    except BaseException:
        _close(made)
        raise


class _Secret:
    """This rank's token in its own memory, for the peer to read."""

    def __init__(self, mine: Record) -> None:
        self._token = bytes.fromhex(mine.token)

    def __enter__(self) -> _Secret:
        self._memory = ctypes.create_string_buffer(self._token, len(self._token))
        return self

    def __exit__(self, *_: object) -> None:
        del self._memory

    def hello(self, direction: int) -> bytes:
        return _HELLO.pack(_MAGIC, VERSION, direction, self._token, ctypes.addressof(self._memory))


def _hear(sock: socket.socket, theirs: Record, seconds: float | None, keep_on: KeepOn) -> tuple[int, int] | None:
    """The direction and the address that a peer names; ``None`` if it is not the peer that is meant."""
    data = _receive(sock, seconds, keep_on)
    if len(data) != _HELLO.size:
        return None
    magic, version, direction, token, address = _HELLO.unpack(data)
    if (magic, version, token) != (_MAGIC, VERSION, bytes.fromhex(theirs.token)) or direction not in (0, 1):
        return None
    return direction, address


def _agree(out: socket.socket, into: socket.socket, address: int, theirs: Record, peer: int, keep_on: KeepOn) -> Both:
    """Each end tells the other whether it can read: that decides about the direction towards it."""
    try:
        for sock in (out, into):
            prepare(sock)
    except (OSError, TooSmall) as error:
        raise Apart(f"no connection within this host: {error}") from error
    pid = _credentials(into)[0]
    why_not = local_memory.why_not_read(pid, address, bytes.fromhex(theirs.token))
    # On the socket on which data comes here, since that is what it is about. From here on there is no way back: the
    # peer may use the connection as soon as it has this.
    _tell(into, (b"1" if not why_not else b"0") + why_not.encode()[: _RESULT_BYTES - 1])
    answer = _receive(out, None, keep_on)
    if not answer:
        raise Ended
    read_by_peer = answer[:1] == b"1"
    connection = Connection(peer, out, into)
    spins = spinning_pays()
    how = _ways(peer, "" if read_by_peer else answer[1:].decode(errors="replace"), why_not)
    outbound = Outbound(connection, is_read=read_by_peer, spins=spins)
    inbound = Inbound(connection, pid=pid, reads=not why_not, spins=spins, threads=threads_for_copies())
    return Both(connection, outbound, inbound, how)


def _ways(peer: int, why_not_there: str, why_not_here: str) -> str:
    """How bytes travel in both directions, given why their memory is not read there and here, if so."""
    if not why_not_there and not why_not_here:
        return "large segments are read from the sender's memory"
    return f"{_way(f'to rank {peer}', why_not_there)}; {_way(f'from rank {peer}', why_not_here)}"


def _way(which: str, why_not: str) -> str:
    if not why_not:
        return f"{which}: large segments are read from the sender's memory"
    return f"{which}: all bytes go over the socket, since for the receiver {why_not}"


def _tell(sock: socket.socket, record: bytes) -> None:
    try:
        sock.send(record, NOW)
    except OSError as error:
        raise Ended from error


def _receive(sock: socket.socket, seconds: float | None, keep_on: KeepOn) -> bytes:
    """The next record; empty if none comes in time, or the other end is gone."""
    waited = 0.0
    while not _readable(sock, _LOOK_SECONDS):
        keep_on()
        waited += _LOOK_SECONDS
        if seconds is not None and waited >= seconds:
            return b""
    try:
        return sock.recv(_RESULT_BYTES)
    except OSError:
        return b""


def _readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them. A process of another namespace is 0."""
    pid, user, group = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user, group


def _check_user(sock: socket.socket) -> None:
    user = _credentials(sock)[1]
    if user != os.geteuid():
        raise Apart(f"at the other end is a process of user {user}, and this one is of user {os.geteuid()}")


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
