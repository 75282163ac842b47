"""Peers of the same host that die, in every phase: the other end gets an error in bounded time, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm.deadline import Deadline
from objcomm.errors import PeerError
from objcomm.transport import describe, local_connect, local_in, local_memory
from tests.links import error_of, filled, link_to
from tests.ranks import run_ranks
from tests.test_transport_local import forbid_reads

MIB = 1 << 20


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    """In a rank, which ends after its test."""
    setattr(module, name, function)


def survives(call: Callable[[], object], seconds: float = 8.0) -> None:
    began = time.monotonic()
    with pytest.raises(objcomm.PeerError) as caught:
        call()
    assert time.monotonic() - began < seconds
    assert caught.value.peer is not None
    with pytest.raises(objcomm.PeerError):
        call()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("function", ["", "listen", "connect", "_hear", "_credentials", "_agree", "Inbound"])
def test_a_peer_that_dies_while_contact_is_made(victim: int, function: str) -> None:
    if (function, victim) in (("listen", 1), ("connect", 0)):
        victim = 1 - victim  # only one of the ends does that

    def ranks(rank: int) -> None:
        if rank == victim:
            if not function:
                time.sleep(0.3)
                die()
            replace(local_connect, function, die)
            objcomm.recv_object(1 - rank)
        survives(lambda: objcomm.recv_object(victim, timeout=25))

    run_ranks(ranks, may_die=(victim,), backend="local")


@pytest.mark.parametrize("reads", [True, False])
def test_a_sender_that_dies_while_its_memory_is_read(reads: bool) -> None:
    def ranks(rank: int) -> None:
        if not reads:
            forbid_reads()
        if rank == 0:
            objcomm.send_object(os.getpid(), 1)
            objcomm.send_object(torch.ones(100 * MIB, dtype=torch.uint8), 1)
            time.sleep(20)
        victim = int(str(objcomm.recv_object(0)))
        real = local_memory.read

        def read(pid: int, address: int, into: int, nbytes: int, *more: Any, **options: Any) -> None:
            real(pid, address, into, nbytes // 2, *more, **options)
            os.kill(victim, signal.SIGKILL)
            real(pid, address + nbytes // 2, into + nbytes // 2, nbytes - nbytes // 2, *more, **options)

        replace(local_memory, "read", read)
        stream = local_in.Inbound._stream
        pieces: list[int] = []

        def stream_then_kill(*args: Any, **kwargs: Any) -> None:
            stream(*args, **kwargs)
            pieces.append(1)
            if len(pieces) == 10:
                os.kill(victim, signal.SIGKILL)

        replace(local_in.Inbound, "_stream", stream_then_kill)
        survives(lambda: objcomm.recv_object(0))

    run_ranks(ranks, may_die=(0,), backend="local")


def test_what_was_read_of_a_sender_that_has_gone_meanwhile_is_not_delivered() -> None:
    """Its pid may be another process by then; and a sender that gave up may have changed its memory."""

    def ranks(rank: int) -> None:
        there = link_to(1 - rank)
        if rank == 0:
            sending = there.send_segments([filled(MIB, 1)])
            with pytest.raises(objcomm.TransferTimeout):
                sending.wait(Deadline(1))
            dist.barrier()
        else:
            real = local_memory.read

            def read(*args: Any, **options: Any) -> None:
                real(*args, **options)
                dist.barrier()

            replace(local_memory, "read", read)
            error = error_of(lambda: there.recv_segments([filled(MIB, 0)], [False]).wait(Deadline(20)))
            assert isinstance(error, PeerError)

    run_ranks(ranks, backend="local")


def test_the_same_where_acknowledgements_have_piled_up() -> None:
    def ranks(rank: int) -> None:
        there = link_to(1 - rank)
        if rank == 0:
            sending = [there.send_segments([filled(70_000, 1)]) for _ in range(5_000)]
            dist.barrier()
            there.close()
            dist.barrier()
            assert len(sending) == 5_000
        else:
            into = filled(70_000, 0)
            for _ in range(4_999):
                there.recv_segments([into], [False]).wait(Deadline(20))
            dist.barrier()
            dist.barrier()
            error = error_of(lambda: there.recv_segments([into], [False]).wait(Deadline(20)))
            assert isinstance(error, PeerError)

    run_ranks(ranks, backend="local")


@pytest.mark.parametrize("reads", [True, False])
def test_a_receiver_that_dies_with_much_on_its_way(reads: bool) -> None:
    def ranks(rank: int) -> None:
        if not reads:
            forbid_reads()
        if rank == 1:
            objcomm.send_object(os.getpid(), 0)
            time.sleep(20)
        victim = int(str(objcomm.recv_object(1)))
        small = [objcomm.isend_object({"i": i, "pad": b"x" * 30_000}, 1) for i in range(400)]
        large = objcomm.isend_object(torch.ones(20 * MIB, dtype=torch.uint8), 1)
        os.kill(victim, signal.SIGKILL)
        survives(lambda: large.wait())
        with pytest.raises(objcomm.PeerError):
            small[-1].wait()

    run_ranks(ranks, may_die=(1,), backend="local")


def test_a_frozen_peer_is_a_time_out_and_its_memory_can_still_be_read() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object(os.getpid(), 1)
            objcomm.isend_object(torch.ones(MIB), 1)
            time.sleep(20)
        victim = int(str(objcomm.recv_object(0)))
        time.sleep(0.5)
        os.kill(victim, signal.SIGSTOP)
        assert bool((objcomm.recv_object(0) == 1).all())
        began = time.monotonic()
        with pytest.raises(objcomm.TransferTimeout):
            objcomm.recv_object(0, timeout=0.5)
        assert time.monotonic() - began < 5
        os.kill(victim, signal.SIGKILL)

    run_ranks(ranks, may_die=(0,), backend="local")


def test_a_child_of_the_peer_does_not_keep_the_connection_alive() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object("alive", 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of threads, as it should
                child = os.fork()
            if child == 0:
                time.sleep(15)
                os._exit(0)
            objcomm.send_object(child, 1)
            die()
        assert objcomm.recv_object(0) == "alive"
        child = int(str(objcomm.recv_object(0)))
        try:
            survives(lambda: objcomm.recv_object(0))
        finally:
            os.kill(child, signal.SIGKILL)

    run_ranks(ranks, may_die=(0,), backend="local")


def test_memory_that_cannot_be_read_when_it_comes_to_it() -> None:
    def ranks(rank: int) -> None:
        there = link_to(1 - rank)
        assert objcomm.exchange_objects(rank, 1 - rank) == 1 - rank
        if rank == 0:
            error = error_of(lambda: there.send_segments([filled(MIB, 1)]).wait(Deadline(20)))
            assert isinstance(error, PeerError)
        else:
            forbid_reads()
            error = error_of(lambda: there.recv_segments([filled(MIB, 1)], [False]).wait(Deadline(20)))
            assert isinstance(error, PeerError)
            assert "the memory of rank 0 cannot be read" in str(error)
            world = dist.group.WORLD
            assert world is not None
            assert "closed" in describe(world, 0)

    run_ranks(ranks, backend="local")
