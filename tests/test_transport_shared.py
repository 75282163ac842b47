"""Copies that several threads share out among themselves."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from objcomm.transport import local_memory, local_shared
from objcomm.transport.local_shared import Shared


def nothing() -> None:
    return None


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 11, 1000])
def test_every_piece_is_done_once(threads: int, nbytes: int) -> None:
    done: list[tuple[int, int]] = []
    Shared(lambda start, end: done.append((start, end)), nbytes, 10).run(threads, nothing)
    assert sorted(done) == [(start, min(nbytes, start + 10)) for start in range(0, nbytes, 10)]


def test_several_threads_take_part() -> None:
    meeting = threading.Barrier(3, timeout=20)
    who: set[int] = set()

    def do(start: int, end: int) -> None:
        meeting.wait()  # broken unless three threads are at work at once
        who.add(threading.get_ident())

    Shared(do, 30, 10).run(3, nothing)
    assert len(who) == 3


@pytest.mark.parametrize("place", [0, 35, 70])
def test_an_error_in_any_thread_is_raised_and_ends_it(place: int) -> None:
    done: list[int] = []

    def do(start: int, end: int) -> None:
        if start <= place < end:
            raise OSError(14, "gone")
        time.sleep(0.002)
        done.append(start)

    with pytest.raises(OSError, match="gone"):
        Shared(do, 100_000, 10).run(3, nothing)
    assert len(done) < 9_000


def test_nothing_is_at_work_once_it_was_given_up() -> None:
    inside = 0
    lock = threading.Lock()

    def do(start: int, end: int) -> None:
        nonlocal inside
        with lock:
            inside += 1
        time.sleep(0.01)
        with lock:
            inside -= 1

    def stop() -> None:
        raise TimeoutError("no longer wanted")

    for _ in range(10):
        with pytest.raises(TimeoutError):
            Shared(do, 10_000, 10).run(4, stop)
        assert inside == 0


def test_an_interrupt_leaves_nothing_at_work() -> None:
    """A signal may come at any point, also while the other threads are waited for."""
    at_work = [0, 0]

    def do(start: int, end: int) -> None:
        me = 0 if threading.current_thread() is threading.main_thread() else 1
        try:
            at_work[me] += 1
            time.sleep(0.0005)
        finally:
            at_work[me] -= 1

    class Stop(Exception):
        pass

    def raise_stop(number: int, frame: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, raise_stop)
    try:
        for attempt in range(60):
            work = Shared(do, 300, 10)
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + attempt * 0.0001)
            try:
                work.run(2, nothing)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                assert at_work[1] == 0
            at_work[0] = 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_it_goes_on_alone_if_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    Shared(lambda start, end: done.append(start), 50, 10).run(4, nothing)
    assert done == [0, 10, 20, 30, 40]


def test_no_thread_is_left() -> None:
    for _ in range(20):
        Shared(lambda start, end: time.sleep(0.001), 100, 10).run(4, nothing)
    end = time.monotonic() + 10
    while any(thread.name == "objcomm-copy" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs process_vm_readv")
@pytest.mark.parametrize("nbytes", [local_memory.SHARED_FROM - 1, local_memory.SHARED_FROM, (9 << 20) + 7])
def test_a_shared_read_is_the_whole(nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 1, dtype=torch.uint8)
    local_memory.read(os.getpid(), source.data_ptr(), target.data_ptr(), nbytes, threads=3)
    assert torch.equal(source, target[:-1])
    assert target[-1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs process_vm_readv")
def test_a_shared_read_of_what_is_not_there_fails() -> None:
    target = torch.zeros(local_memory.SHARED_FROM, dtype=torch.uint8)
    with pytest.raises(OSError) as caught:
        local_memory.read(os.getpid(), 4096, target.data_ptr(), len(target), threads=3)
    assert caught.value.errno == 14


@pytest.mark.parametrize(
    ("cores", "allowed", "ranks", "threads"),
    [(2, 2, 2, 2), (2, 2, 4, 1), (2, 1, 1, 1), (64, 64, 8, 4), (8, 8, 8, 2), (8, 3, 2, 3), (1, 1, 16, 1)],
)
def test_how_many_threads_share_a_copy(
    monkeypatch: pytest.MonkeyPatch, cores: int, allowed: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert local_shared.threads_for_copies() == threads
