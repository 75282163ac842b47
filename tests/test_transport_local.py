"""The connection of two ranks of one host: what it carries, and that nothing disturbs its order."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm.deadline import Deadline
from objcomm.errors import PeerError, TransferTimeout
from objcomm.transport import describe, local_memory, local_socket
from tests.links import error_of, filled, link_to
from tests.ranks import run_ranks
from tests.same import assert_arrived
from tests.values import VALUES

MIB = 1 << 20


def forbid_reads() -> None:
    """From now on the kernel refuses, as it does in many containers."""

    def refuse(*args: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    local_memory._readv = refuse


def made_contact(rank: int) -> str:
    """Exchange something with the other of two ranks, and tell which way it took."""
    assert objcomm.exchange_objects(rank, 1 - rank) == 1 - rank
    world = dist.group.WORLD
    assert world is not None
    return describe(world, 1 - rank)


def test_reading_memory() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    target = torch.zeros(200, dtype=torch.uint8)
    asked: list[int] = []
    local_memory.read(os.getpid(), source.data_ptr(), target.data_ptr(), 200, lambda: asked.append(1))
    assert torch.equal(source, target)
    assert not asked
    with pytest.raises(OSError, match="Bad address"):
        local_memory.read(os.getpid(), 8, target.data_ptr(), 16)
    with pytest.raises(OSError, match="No such process"):
        local_memory.read(2**22 + 1, source.data_ptr(), target.data_ptr(), 16)


def test_a_long_read_is_given_up_when_it_is_no_longer_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_memory, "_PIECE_BYTES", 50)
    source, target = torch.ones(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        local_memory.read(os.getpid(), source.data_ptr(), target.data_ptr(), 200, stop)
    assert int(target.sum()) == 50
    local_memory.read(os.getpid(), source.data_ptr(), target.data_ptr(), 200)
    assert int(target.sum()) == 200


def test_why_memory_cannot_be_read() -> None:
    secret = ctypes.create_string_buffer(b"0123456789abcdef", 16)
    address = ctypes.addressof(secret)
    assert local_memory.why_not_read(os.getpid(), address, b"0123456789abcdef") == ""
    assert "another process" in local_memory.why_not_read(os.getpid(), address, b"0123456789abcdeX")
    assert "pid namespace" in local_memory.why_not_read(0, address, b"0123456789abcdef")
    assert "ESRCH" in local_memory.why_not_read(2**22 + 1, address, b"0123456789abcdef")
    assert "EFAULT" in local_memory.why_not_read(os.getpid(), 8, b"0123456789abcdef")


def test_memory_that_a_driver_has_mapped_is_open_to_its_own_process_alone() -> None:
    """Such as the clock that the kernel shows to every process."""
    regions = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[vvar]")]
    for region in regions:
        address = int(region.split("-")[0], 16)
        assert len(ctypes.string_at(address, 8)) == 8
        assert not local_memory.readable(address, 8)
    memory = torch.ones(100_000)
    assert local_memory.readable(memory.data_ptr(), 400_000)
    assert not local_memory.readable(8, 100)
    assert not local_memory.readable(memory.data_ptr(), 1 << 46)


def test_segments_that_only_their_owner_can_read_go_over_the_socket() -> None:
    def ranks(rank: int) -> None:
        sizes = [70_000, 3 * MIB, 65_537, 100, 65_536, 200_000, 5 * MIB]
        closed = {65_537, 5 * MIB} if rank else {3 * MIB, 65_537, 200_000}
        real = local_memory.readable
        local_memory.readable = lambda address, nbytes: nbytes not in closed and real(address, nbytes)
        there = link_to(1 - rank)
        for _ in range(3):
            sending = there.send_segments([filled(n, i + rank) for i, n in enumerate(sizes)])
            into = [filled(n, 99) for n in sizes]
            there.recv_segments(into[:3], [False] * 3).wait(Deadline(20))
            there.recv_segments(into[3:], [False] * 4).wait(Deadline(20))
            sending.wait(Deadline(20))
            for i, one in enumerate(into):
                assert (one == i + 1 - rank).all()
        assert "within the host" in made_contact(rank)

    run_ranks(ranks, backend="local")


@pytest.mark.parametrize("forbidden_on", [[0], [1], [0, 1]])
def test_where_the_kernel_forbids_reading_everything_goes_over_the_socket(forbidden_on: list[int]) -> None:
    def ranks(rank: int) -> None:
        if rank in forbidden_on:
            forbid_reads()
        how = made_contact(rank)
        # A rank that may not read receives over the socket, whatever it sends.
        assert ("from rank" in how) and ("EPERM" in how.split(";")[2]) == (rank in forbidden_on), how
        assert ("EPERM" in how.split(";")[1]) == (1 - rank in forbidden_on), how
        torch.manual_seed(11)
        sent: dict[str, Any] = {name: make() for name, make in VALUES}
        large = [torch.arange(n) + rank for n in (70_000, 3 * MIB, 65_536 // 8, 65_544 // 8)]
        works: list[objcomm.ObjectWork[Any]] = [
            objcomm.isend_object(large, 1 - rank),
            objcomm.isend_object(sent, 1 - rank),
        ]
        expected = [torch.arange(n) + 1 - rank for n in (70_000, 3 * MIB, 65_536 // 8, 65_544 // 8)]
        assert_arrived(objcomm.recv_object(1 - rank), expected)
        received = objcomm.recv_object(1 - rank)
        for name, value in sent.items():
            assert_arrived(received[name], value)
        for work in works:
            work.wait()

    run_ranks(ranks, backend="local", timeout=90)


@pytest.mark.parametrize("reads", [True, False])
def test_more_than_fits_into_the_socket_goes_out_while_nobody_waits(reads: bool) -> None:
    """Both ranks post everything, meet somewhere else, and only then receive."""

    def ranks(rank: int) -> None:
        if not reads:
            forbid_reads()
        made_contact(rank)
        posted: list[objcomm.ObjectWork[Any]] = [
            objcomm.isend_object({"i": i, "t": torch.full((n,), i)}, 1 - rank)
            for i in range(60)
            for n in (3, 5_000, 9_000, 200_000)
        ]
        ahead = [objcomm.irecv_object(1 - rank) for _ in range(100)]
        for work in ahead:
            work.wait()
        dist.barrier()
        received = [work.wait() for work in ahead] + [objcomm.recv_object(1 - rank) for _ in range(140)]
        got = [(one["i"], one["t"].numel(), int(one["t"].sum())) for one in received]
        assert got == [(i, n, i * n) for i in range(60) for n in (3, 5_000, 9_000, 200_000)]
        for sent in posted:
            sent.wait()

    run_ranks(ranks, backend="local")


def test_acknowledgements_that_nobody_takes_do_not_hold_up_the_receiver() -> None:
    def ranks(rank: int) -> None:
        there = link_to(1 - rank)
        count = 3_000
        if rank == 0:
            piece = filled(70_000, 7)
            sent = [there.send_segments([piece]) for _ in range(count)]
            dist.barrier()
            for pending in reversed(sent):
                pending.wait(Deadline(20))
        else:
            into = filled(70_000, 0)
            for _ in range(count):
                there.recv_segments([into], [False]).wait(Deadline(20))
            dist.barrier()
            assert (into == 7).all()

    run_ranks(ranks, backend="local")


def test_a_send_that_fits_nowhere_ends_in_bounded_time() -> None:
    def ranks(rank: int) -> None:
        there = link_to(1 - rank)
        made_contact(rank)
        if rank == 0:
            sent = [there.send_head(filled(60_000, 1)) for _ in range(300)]
            began = time.monotonic()
            error = error_of(lambda: sent[-1].wait(Deadline(0.3)))
            assert isinstance(error, TransferTimeout)
            assert "rank 1 did not come within 0.3 s" in str(error)
            assert time.monotonic() - began < 3
            assert error_of(lambda: sent[-1].wait(Deadline(5))) is error
            for failing in (lambda: there.send_head(filled(3, 1)), lambda: there.recv_head(filled(3, 1))):
                assert "closed since" in str(error_of(failing))
        else:
            time.sleep(1.5)
            began = time.monotonic()

            def take_all() -> None:
                for _ in range(300):
                    there.recv_head(filled(1 << 16, 1)).wait(Deadline(20))

            error = error_of(take_all)
            assert isinstance(error, PeerError)
            assert time.monotonic() - began < 3
        dist.barrier()

    run_ranks(ranks, backend="local")


def test_a_time_out_closes_this_pair_and_no_other() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object(0, 2)
            objcomm.send_object(0, 1)
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(1, timeout=0.3)
            objcomm.send_object({"still": torch.ones(MIB)}, 2)
        elif rank == 1:
            assert objcomm.recv_object(0) == 0
            with pytest.raises(objcomm.PeerError):
                objcomm.recv_object(0)
            objcomm.send_object(1, 2)
        else:
            assert objcomm.recv_object(0) == 0
            assert_arrived(objcomm.recv_object(0), {"still": torch.ones(MIB)})
            assert objcomm.recv_object(1) == 1
        dist.barrier()  # the group itself is as usable as before

    run_ranks(ranks, 3, backend="local")


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("nbytes", [100, 5 * MIB])
def test_an_interrupted_receive_goes_on_where_it_was(nbytes: int, reads: bool) -> None:
    def ranks(rank: int) -> None:
        if not reads:
            forbid_reads()
        there = link_to(1 - rank)
        made_contact(rank)
        if rank == 0:
            for value in (1, 2):
                time.sleep(0.6)
                there.send_segments([filled(nbytes, value), filled(nbytes, value + 10)]).wait(Deadline(20))
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for value in (1, 2):
            into = [filled(nbytes, 0), filled(nbytes, 0)]
            receiving = there.recv_segments(into, [False] * 2)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                receiving.wait(Deadline(20))
            receiving.wait(Deadline(20))
            assert (into[0] == value).all() and (into[1] == value + 10).all()

    run_ranks(ranks, backend="local")


def test_what_does_not_fit_what_is_due_is_an_error_on_both_ends() -> None:
    def ranks(rank: int) -> None:
        cases = [(100, 200), (200, 100), (70_000, 80_000), (80_000, 70_000), (3, 80_000), (80_000, 3)]
        for sent, due in cases:
            there = link_to(1 - rank, dist.new_group([0, 1]))
            if rank == 0:
                pending = there.send_segments([filled(sent, 1)])
                if sent > 65536:
                    assert isinstance(error_of(lambda p=pending: p.wait(Deadline(20))), PeerError)
            else:
                receiving = there.recv_segments([filled(due, 0)], [False])
                error = error_of(lambda p=receiving: p.wait(Deadline(20)))
                assert isinstance(error, PeerError)
                assert str(due) in str(error)

    run_ranks(ranks, backend="local")


def test_many_threads_on_one_link() -> None:
    def ranks(rank: int) -> None:
        there = link_to(1 - rank)
        failures: list[BaseException] = []

        def run(action: Any) -> None:
            try:
                for _ in range(40):
                    action()
            except BaseException as error:
                failures.append(error)

        def go(nbytes: int) -> None:
            there.send_segments([filled(nbytes, rank)]).wait(Deadline(20))

        def take() -> None:
            one = filled(100_000, 9)
            there.recv_segments([one], [False]).wait(Deadline(20))
            assert (one == 1 - rank).all()

        actions = [lambda: go(100_000), take, lambda: go(100_000), take]
        threads = [threading.Thread(target=run, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not failures, failures

    run_ranks(ranks, backend="local")


def test_whether_spinning_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for ranks, pays in (("4", True), ("5", False), ("", True), ("x", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert local_socket.spinning_pays() == pays


def test_making_contact_does_not_need_the_programs_connection_to_the_store() -> None:
    """While groups are made, which takes both ranks, a rank waits in its connection to the store."""

    def ranks(rank: int) -> None:
        if rank == 0:
            sent = objcomm.isend_object({"t": torch.ones(MIB)}, 1)
            dist.new_group([0, 1])
            sent.wait()
        else:
            assert_arrived(objcomm.recv_object(0), {"t": torch.ones(MIB)})
            dist.new_group([0, 1])

    run_ranks(ranks, backend="local")


class Hit(Exception):
    """Raised by a signal's handler, wherever it finds the program."""


@pytest.mark.parametrize("reads", [True, False])
def test_waits_that_are_interrupted_again_and_again_lose_nothing(reads: bool) -> None:
    def ranks(rank: int) -> int:
        if not reads:
            forbid_reads()
        there = link_to(1 - rank)
        made_contact(rank)
        sizes = random.Random(3).choices([1, 100, 65_536, 65_537, 200_000, 1_000_000], k=300)
        moments = random.Random(rank)
        hits = 0

        def hit(*args: Any) -> None:
            raise Hit

        signal.signal(signal.SIGALRM, hit)
        for i, nbytes in enumerate(sizes):
            memory = filled(nbytes, i % 251 if rank == 0 else 252)
            pending = there.send_segments([memory]) if rank == 0 else there.recv_segments([memory], [False])
            over = False
            while not over:
                try:
                    signal.setitimer(signal.ITIMER_REAL, moments.random() * 6e-4 + 1e-6)
                    pending.wait(Deadline(20))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    over = True
                except Hit:
                    hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (memory == i % 251).all()
        return hits

    assert all(hits > 5 for hits in run_ranks(ranks, backend="local"))
