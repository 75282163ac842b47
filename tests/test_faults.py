"""Faults that were found by breaking things on purpose: dead and frozen peers, signals, odd arguments, odd modes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm.deadline import Deadline
from objcomm.errors import ObjcommError, PeerError, UsageError
from objcomm.transport import link, resolve
from objcomm.wire import card
from objcomm.wire.frame import Terms
from objcomm.wire.notice import notice_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.also_local

MIB = 1 << 20


def kill_during(method: str, pid: int) -> None:
    """Kill a process shortly after this rank has posted its next segments."""
    from objcomm.transport import routes

    original: Callable[..., Any] = getattr(routes.GroupLink, method)

    def post(*args: Any) -> Any:
        pending = original(*args)
        time.sleep(0.005)  # the backend moves bytes meanwhile, and has hundreds of milliseconds to go
        os.kill(pid, signal.SIGKILL)
        return pending

    setattr(routes.GroupLink, method, post)


def test_a_sender_that_dies_in_the_middle_of_a_segment_is_noticed() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object(os.getpid(), 1)
            objcomm.send_object(torch.ones(500 * MIB, dtype=torch.uint8), 1)
            time.sleep(20)
        kill_during("recv_segments", int(str(objcomm.recv_object(0))))
        began = time.monotonic()
        with pytest.raises(objcomm.PeerError):
            objcomm.recv_object(0)
        assert time.monotonic() - began < 10

    run_ranks(ranks, may_die=(0,), group_timeout=40)


def test_a_receiver_that_dies_in_the_middle_of_a_segment_is_noticed() -> None:
    def ranks(rank: int) -> None:
        if rank == 1:
            objcomm.send_object(os.getpid(), 0)
            objcomm.recv_object(0)
            time.sleep(20)
        big = torch.ones(500 * MIB, dtype=torch.uint8)
        kill_during("send_segments", int(str(objcomm.recv_object(1))))
        began = time.monotonic()
        with pytest.raises(objcomm.PeerError):
            objcomm.send_object(big, 1)
        assert time.monotonic() - began < 10

    run_ranks(ranks, may_die=(1,), group_timeout=40)


def test_large_messages_both_ways_with_a_slow_peer() -> None:
    def ranks(rank: int) -> None:
        there = resolve(None, 1 - rank, None, "peer")
        way = link(there.group, there.group_rank)
        mine, theirs = torch.full((8 * MIB,), rank, dtype=torch.uint8), torch.empty(8 * MIB, dtype=torch.uint8)
        if rank == 1:
            time.sleep(1.0)  # long enough for the other end to look after the connection twice
        pendings = [way.send_segments([mine]), way.recv_segments([theirs], [False])]
        for pending in pendings + pendings:
            pending.wait(Deadline(20))
        assert bool((theirs == 1 - rank).all())

    run_ranks(ranks)


def test_an_interrupted_wait_does_not_wait_twice_for_what_is_over() -> None:
    def ranks(rank: int) -> None:
        there = resolve(None, 1 - rank, None, "peer")
        way = link(there.group, there.group_rank)
        if rank == 1:
            time.sleep(1.0)
            way.recv_head(torch.empty(way.window, dtype=torch.uint8)).wait(Deadline(20))
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sending = way.send_head(torch.ones(10, dtype=torch.uint8))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            sending.wait(Deadline(20))
        sending.wait(Deadline(0.2))

    run_ranks(ranks)


class FrozenStore:
    """A store whose host does not answer any more."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def set(self, key: str, value: str, /) -> None:
        self.thawed.wait()

    def get(self, key: str, /) -> bytes:
        self.thawed.wait()
        return b""

    def check(self, keys: list[str], /) -> bool:
        return self.thawed.wait()


def test_a_frozen_store_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "STORE_SECONDS", 0.1)
    monkeypatch.setattr(card, "_REASON_SECONDS", 0.1)
    store = FrozenStore()
    calls: list[Callable[[], object]] = [
        lambda: card.publish(store, 0, Terms(1, 1)),
        lambda: card.terms_of(store, 0),
        lambda: card.refuse(store, 0, 1, "reason"),
        lambda: card.refusal(store, 0, 1),
        lambda: card.forget(store, 0, 1),
    ]
    began = time.monotonic()
    for call in calls:
        with pytest.raises(RuntimeError, match=r"no answer within 0\.1 s"):
            call()
    store.thawed.set()
    assert time.monotonic() - began < 5


def test_a_frozen_rank_that_keeps_the_store_is_noticed_in_time() -> None:
    def ranks(rank: int) -> None:
        store = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False, timeout=timedelta(seconds=30)
        )
        if rank == 0:
            own = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            store.set("port", str(own.port))
        else:
            own = dist.TCPStore("127.0.0.1", int(store.get("port")), None, is_master=False)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        if rank == 0:
            objcomm.send_object(os.getpid(), 1)
            time.sleep(30)
        pid = int(str(objcomm.recv_object(0)))
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(0, timeout=1)
            assert time.monotonic() - began < 8
        finally:
            os.kill(pid, signal.SIGKILL)

    run_ranks(ranks, backend=None, may_die=(0,))


def test_a_refusal_of_an_earlier_group_can_be_forgotten() -> None:
    store = dist.HashStore()
    card.refuse(store, 1, 0, "bad \ud800 message")
    assert card.refusal(store, 0, 1) == "bad ? message"
    card.forget(store, 0, 1)
    assert card.refusal(store, 0, 1) is None


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_notice_of_an_error_that_cannot_be_shown() -> None:
    assert notice_of(SilentError()).error == "SilentError"
    assert "ValueError" in notice_of(SilentError()).text


def test_what_equals_a_rank_is_no_rank_however_often_it_is_asked() -> None:
    def ranks(rank: int) -> None:
        peer = 1 - rank
        for _ in range(2):
            odd: list[Any] = [float(peer), [peer], {}, str(peer), *([True] if peer == 1 else [False])]
            for value in odd:
                with pytest.raises(UsageError):
                    resolve(None, value, None, "dst")
                with pytest.raises(UsageError):
                    resolve(None, None, value, "dst")
            assert resolve(None, peer, None, "dst")[1:] == (peer, peer)
            assert resolve(None, None, peer, "dst")[1:] == (peer, peer)
            with pytest.raises(UsageError):
                resolve(None, peer, peer, "dst")

    run_ranks(ranks)


def test_the_memory_of_a_link_is_where_it_belongs_whatever_the_default_device(backend: str) -> None:
    def ranks(rank: int) -> None:
        there = resolve(None, 1 - rank, None, "peer")
        way = link(there.group, there.group_rank)
        torch.set_default_device("meta")
        memory = way.allocate(3 * MIB, False, None)
        assert memory.device.type == "cpu"
        if rank == 0:
            way.send_segments([memory.fill_(5)]).wait(Deadline(20))
        else:
            way.recv_segments([memory], [False]).wait(Deadline(20))
            assert bool((memory == 5).all())
        way.close()

    run_ranks(ranks, backend=backend)


def test_a_process_that_ends_before_the_peer_made_contact_ends_well() -> None:
    def ranks(rank: int) -> None:
        if rank == 1:
            return
        there = resolve(None, 1, None, "peer")
        pending = link(there.group, there.group_rank).send_head(torch.zeros(4096, dtype=torch.uint8))
        from objcomm.transport.lanes import _flush

        began = time.monotonic()
        _flush()
        assert time.monotonic() - began < 3
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("objcomm-open")]
        with pytest.raises(PeerError):
            pending.wait(Deadline(1))
        assert issubclass(PeerError, ObjcommError)

    run_ranks(ranks, backend="strict")
