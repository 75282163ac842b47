"""Faults that leave both processes alive, each in a group of its own: what happens on either end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm.transport import local_memory
from objcomm.transport.routes import GroupLink
from objcomm.work import _leave
from tests.faults.phases import Patches, halfway, is_payload, payload
from tests.process import a_forked_child_is_refused, sockets

BOUND_SECONDS = 6.0
# The time-out of calls that must end long before it.
LONG = 20.0
MIB = 1 << 20

Scenario = Callable[[int, Any, "Clock"], None]


class Clock:
    """Keeps the longest time that an error took."""

    def __init__(self) -> None:
        self.worst = 0.0

    @contextlib.contextmanager
    def error(self, *kinds: type[BaseException]) -> Iterator[None]:
        began = time.monotonic()
        with pytest.raises(kinds or objcomm.ObjcommError):
            yield
        took = time.monotonic() - began
        self.worst = max(self.worst, took)
        assert took < BOUND_SECONDS, f"it took {took:.1f} s"

    def either(self, call: Callable[[], object], good: Callable[[Any], bool]) -> bool:
        """Make a call that may go well, with a good result, or fail with an error of objcomm's, in time."""
        began = time.monotonic()
        try:
            result = call()
        except objcomm.ObjcommError:
            result = None
        else:
            assert good(result), result
        took = time.monotonic() - began
        self.worst = max(self.worst, took)
        assert took < BOUND_SECONDS, f"it took {took:.1f} s"
        return result is not None


def destroy(group: Any) -> None:
    try:
        dist.destroy_process_group(group)
    except RuntimeError as error:
        # torch does not give a backend that is written in Python the name of its group; it says so at the very end.
        if "name not set" not in str(error):
            raise


def works(rank: int, group: Any) -> None:
    """Whether the pair is as good as before."""
    for kind in ("small", "segment"):
        assert is_payload(objcomm.exchange_objects(payload(kind, 1), 1 - rank, group=group, timeout=LONG), kind)


def frozen(rank: int, group: Any, clock: Clock) -> None:
    """Rank 0 is stopped while rank 1 waits for it, and goes on after rank 1 has given up."""
    if rank == 0:
        objcomm.send_object(os.getpid(), 1, group=group)
        with clock.error():
            objcomm.recv_object(1, group=group, timeout=LONG)
        return
    pid: Any = objcomm.recv_object(0, group=group)
    os.kill(pid, signal.SIGSTOP)
    try:
        with clock.error(objcomm.TransferTimeout):
            objcomm.recv_object(0, group=group, timeout=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    with clock.error(objcomm.PeerError):
        objcomm.recv_object(0, group=group, timeout=LONG)


def frozen_for_a_moment(rank: int, group: Any, clock: Clock) -> None:
    """Rank 0 is stopped in the middle of an exchange, and goes on."""
    if rank == 0:
        objcomm.send_object(os.getpid(), 1, group=group)
    else:
        pid: Any = objcomm.recv_object(0, group=group)
        stop = threading.Timer(0.01, os.kill, (pid, signal.SIGSTOP))
        go_on = threading.Timer(0.6, os.kill, (pid, signal.SIGCONT))
        stop.start()
        go_on.start()
    for _ in range(6):
        arrived = objcomm.exchange_objects(payload("segment", 16), 1 - rank, group=group, timeout=LONG)
        assert is_payload(arrived, "segment")
    if rank == 1:
        stop.join()
        go_on.join()
    works(rank, group)


def more_than_a_socket_holds(rank: int, group: Any, clock: Clock) -> None:
    """What rank 1 does not take yet waits at rank 0, and arrives in its order."""
    if rank == 0:
        works_sent = [objcomm.isend_object((i, b"x" * 50_000), 1, group=group) for i in range(400)]
        for work in works_sent:
            work.wait()
    else:
        time.sleep(0.4)
        assert [objcomm.recv_object(0, group=group)[0] for _ in range(400)] == list(range(400))
    works(rank, group)


def more_than_is_ever_taken(rank: int, group: Any, clock: Clock) -> None:
    """Rank 1 takes nothing until rank 0 has given up."""
    if rank == 0:
        sends = [objcomm.isend_object((i, b"x" * 50_000), 1, group=group) for i in range(400)]
        with clock.error(objcomm.TransferTimeout):
            sends[-1].wait(timeout=0.5)
        with clock.error(objcomm.TransferTimeout, objcomm.PeerError):
            sends[-1].wait(timeout=LONG)
        return
    time.sleep(1.5)
    for i in range(400):
        if not clock.either(lambda: objcomm.recv_object(0, group=group, timeout=LONG), lambda got, i=i: got[0] == i):  # type: ignore[misc]
            break
    else:
        raise AssertionError("all of it came, though the sender gave up")


def cut_in_the_middle(rank: int, group: Any, clock: Clock) -> None:
    """The connection breaks while a segment is on its way; both processes live on."""
    patches = Patches()
    if rank == 1:
        halfway("recv_segments")(patches, lambda: _cut(group))
    try:
        with clock.error():
            for _ in range(3):
                if rank == 0:
                    objcomm.send_object(payload("segment", 96), 1, group=group, timeout=LONG)
                else:
                    assert is_payload(objcomm.recv_object(0, group=group, timeout=LONG), "segment")
    finally:
        patches.undo()
    with clock.error(objcomm.PeerError, objcomm.ProtocolError):
        objcomm.recv_object(1 - rank, group=group, timeout=LONG)


def memory_that_can_no_longer_be_read(rank: int, group: Any, clock: Clock) -> None:
    """The kernel refuses the second half of a segment."""
    patches = Patches()
    if rank == 1:

        def make(original: Any) -> Any:
            def read(pid: int, address: int, into: int, nbytes: int, *args: Any, **more: Any) -> None:
                original(pid, address, into, nbytes // 2, *args, **more)
                raise OSError(errno.EPERM, "not permitted any more")

            return read

        patches.wrap(local_memory, "read", make)
    try:
        with clock.error(objcomm.PeerError):
            if rank == 0:
                objcomm.send_object(payload("segment", 8), 1, group=group, timeout=LONG)
            else:
                objcomm.recv_object(0, group=group, timeout=LONG)
    finally:
        patches.undo()


def no_memory_for_a_head(rank: int, group: Any, clock: Clock) -> None:
    """Rank 1 has no memory for the remainder of a head: what follows cannot be told apart any more."""
    patches = Patches()
    if rank == 1:
        patches.wrap(GroupLink, "allocate", lambda _: _no_memory)
    try:
        with clock.error():
            if rank == 0:
                objcomm.send_object(payload("remainder", 8), 1, group=group, timeout=LONG)
                objcomm.send_object(payload("remainder", 8), 1, group=group, timeout=LONG)
            else:
                objcomm.recv_object(0, group=group, timeout=LONG)
    finally:
        patches.undo()
    with clock.error():
        objcomm.recv_object(1 - rank, group=group, timeout=LONG)


def no_memory_for_a_segment(rank: int, group: Any, clock: Clock) -> None:
    """Rank 1 may not have as much memory as the object needs, by a limit of the system."""
    if rank == 0:
        with clock.error():
            objcomm.send_object(torch.empty(700 * MIB, dtype=torch.uint8), 1, group=group, timeout=LONG)
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    # What the C library has kept would do.
    ctypes.CDLL(None).malloc_trim(0)
    resource.setrlimit(resource.RLIMIT_AS, (now + 300 * MIB, before[1]))
    try:
        with clock.error(objcomm.LimitError):
            objcomm.recv_object(0, group=group, timeout=LONG)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class NoMemory:
    """There is none where it is pickled, or where it is rebuilt."""

    def __init__(self, *, here: bool) -> None:
        self.here = here

    def __reduce__(self) -> Any:
        if self.here:
            raise MemoryError("no memory to pickle it")
        return _no_memory, ()


def _no_memory(*args: Any) -> Any:
    raise MemoryError("no memory")


def no_memory_to_encode(rank: int, group: Any, clock: Clock) -> None:
    if rank == 0:
        with clock.error(objcomm.EncodeError):
            objcomm.send_object([torch.ones(MIB), NoMemory(here=True)], 1, group=group, timeout=LONG)
    else:
        with clock.error(objcomm.PeerError):
            objcomm.recv_object(0, group=group, timeout=LONG)
    works(rank, group)


def no_memory_to_decode(rank: int, group: Any, clock: Clock) -> None:
    if rank == 0:
        objcomm.send_object([torch.ones(MIB), NoMemory(here=False)], 1, group=group, timeout=LONG)
    else:
        with clock.error(objcomm.DecodeError):
            objcomm.recv_object(0, group=group, timeout=LONG)
    works(rank, group)


def no_more_threads(rank: int, group: Any, clock: Clock) -> None:
    """No thread can be started on rank 0: calls go well all the same, or fail as they should."""
    patches = Patches()
    if rank == 0:
        patches.wrap(threading.Thread, "start", lambda _: _no_thread)
    try:
        for kind in ("small", "remainder", "segment"):
            if rank == 0:
                objcomm.isend_object(payload(kind, 8), 1, group=group, timeout=LONG).wait()
                assert is_payload(objcomm.irecv_object(1, group=group, timeout=LONG).wait(), kind)
            else:
                assert is_payload(objcomm.recv_object(0, group=group, timeout=LONG), kind)
                objcomm.send_object(payload(kind, 8), 0, group=group, timeout=LONG)
    finally:
        patches.undo()
    works(rank, group)


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _interrupted(call: Callable[[], object], clock: Clock) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with clock.error(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_receive(rank: int, group: Any, clock: Clock) -> None:
    if rank == 0:
        _interrupted(lambda: objcomm.recv_object(1, group=group, timeout=LONG), clock)
        with clock.error():
            objcomm.recv_object(1, group=group, timeout=LONG)
        return
    time.sleep(0.8)
    # Over gloo the wait itself ends only when something has come: see README.
    clock.either(lambda: objcomm.send_object("late", 0, group=group, timeout=LONG), lambda _: True)
    with clock.error():
        for _ in range(3):
            objcomm.send_object(payload("segment", 1), 0, group=group, timeout=LONG)


def interrupted_send(rank: int, group: Any, clock: Clock) -> None:
    if rank == 0:
        _interrupted(lambda: objcomm.send_object(payload("segment", 2), 1, group=group, timeout=LONG), clock)
    else:
        time.sleep(0.8)
        assert is_payload(objcomm.recv_object(0, group=group, timeout=LONG), "segment")
    works(rank, group)


def interrupted_among_all(rank: int, group: Any, clock: Clock) -> None:
    if rank == 0:
        _interrupted(lambda: objcomm.all_gather_objects("x", group=group, timeout=LONG), clock)
        with clock.error():
            objcomm.all_gather_objects("x", group=group, timeout=LONG)
        return
    time.sleep(0.8)
    with clock.error():
        for _ in range(3):
            assert objcomm.all_gather_objects("x", group=group, timeout=LONG) == ["x", "x"]


def forked(rank: int, group: Any, clock: Clock) -> None:
    """A child of a rank neither uses nor closes what it inherited."""
    a_forked_child_is_refused(lambda: objcomm.send_object("from a child", 1 - rank, group=group, timeout=2), _leave)
    works(rank, group)


def destroyed_in_flight(rank: int, group: Any, clock: Clock) -> None:
    """Rank 0 destroys the group with a receive and a large send in flight, while rank 1 waits for something else."""
    if rank == 0:
        receiving = objcomm.irecv_object(1, group=group, timeout=2)
        sending = objcomm.isend_object(payload("segment", 8), 1, group=group, timeout=2)
        destroy(group)
        with clock.error():
            receiving.wait()
        clock.either(sending.wait, lambda obj: is_payload(obj, "segment"))
        return
    clock.either(lambda: objcomm.recv_object(0, group=group, timeout=LONG), lambda obj: is_payload(obj, "segment"))
    with clock.error():
        objcomm.recv_object(0, group=group, timeout=LONG)


def _cut(group: Any) -> None:
    """Shut down every connection of this process that belongs to the group, as a broken network would."""
    for fd in sockets() - _before[group]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            # Not what listens: no network breaks that.
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)


_before: dict[Any, set[int]] = {}


def play(rank: int, scenario: Scenario) -> float:
    """One scenario in a new group; the longest that an error took."""
    before = sockets()
    group: Any = dist.new_group([0, 1])
    _before[group] = before
    works(rank, group)
    clock = Clock()
    try:
        scenario(rank, group, clock)
    finally:
        _before.clear()
        if group in dist.distributed_c10d._world.pg_map:
            destroy(group)
    return clock.worst


EVERYWHERE: list[Scenario] = [
    frozen,
    frozen_for_a_moment,
    more_than_a_socket_holds,
    more_than_is_ever_taken,
    cut_in_the_middle,
    no_memory_for_a_head,
    no_memory_for_a_segment,
    no_memory_to_encode,
    no_memory_to_decode,
    no_more_threads,
    interrupted_receive,
    interrupted_send,
    interrupted_among_all,
    forked,
    destroyed_in_flight,
]
# Where the memory of the peer is read.
WITHIN_A_HOST: list[Scenario] = [memory_that_can_no_longer_be_read]
