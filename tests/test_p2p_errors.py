"""What bad input gets, seen on both ranks, in bounded time, and whether the pair works afterwards."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.process import a_forked_child_is_refused
from tests.ranks import run_ranks

pytestmark = pytest.mark.also_local

MIB = 1 << 20
TAG = 0x6F626A63


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def still_works(rank: int) -> None:
    for obj in ("after", {"t": torch.arange(300_000)}):
        if rank == 0:
            objcomm.send_object(obj, 1)
        else:
            assert str(objcomm.recv_object(0)) == str(obj)
    if rank == 0:
        assert objcomm.recv_object(1) == "back"
    else:
        objcomm.send_object("back", 0)


class Holder:
    def __init__(self, value: Any) -> None:
        self.layers = [0, 1, 2, value]


def test_what_cannot_be_encoded_is_named_on_both_ranks(backend: str) -> None:
    def ranks(rank: int) -> None:
        bad = {"cfg": Holder(threading.Lock()), "big": torch.zeros(MIB)}
        for send in (objcomm.send_object, objcomm.isend_object):
            if rank == 0:
                before = objcomm.stats()
                with within(1), pytest.raises(objcomm.EncodeError) as sent:
                    send(bad, 1, channel="c")
                assert sent.value.path == "obj['cfg'].layers[3]"
                assert sent.value.rank == 0 and sent.value.peer == 1 and sent.value.channel == "c"
                assert "lock" in str(sent.value)
                assert objcomm.stats()["objects_sent"] == before["objects_sent"]
            else:
                with within(1), pytest.raises(objcomm.PeerError) as received:
                    objcomm.recv_object(0, channel="c")
                assert received.value.path == "obj['cfg'].layers[3]"
                assert received.value.rank == 1 and received.value.peer == 0
                for word in ("rank 0", "EncodeError", "lock"):
                    assert word in str(received.value)
            still_works(rank)

    run_ranks(ranks, backend=backend)


def test_exchange_where_one_side_cannot_encode(backend: str) -> None:
    def ranks(rank: int) -> None:
        mine = {"lock": threading.Lock()} if rank == 0 else "fine"
        with pytest.raises(objcomm.EncodeError if rank == 0 else objcomm.PeerError) as caught:
            objcomm.exchange_objects(mine, 1 - rank)
        assert caught.value.path == "obj['lock']"
        assert objcomm.exchange_objects(rank, 1 - rank) == 1 - rank
        still_works(rank)

    run_ranks(ranks, backend=backend)


def test_a_message_above_max_bytes(backend: str) -> None:
    def ranks(rank: int) -> None:
        objcomm.configure(max_bytes=MIB)
        for obj in (torch.zeros(MIB), b"x" * 2 * MIB):
            with within(5), pytest.raises(objcomm.LimitError) as caught:
                objcomm.send_object(obj, 1) if rank == 0 else objcomm.recv_object(0)
            assert str(MIB) in str(caught.value)
        still_works_small(rank)

    def still_works_small(rank: int) -> None:
        if rank == 0:
            objcomm.send_object(torch.zeros(1000), 1)
        else:
            assert objcomm.recv_object(0).shape == (1000,)

    run_ranks(ranks, backend=backend)


def test_a_wrong_channel_names_both_and_the_next_message_arrives(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object({"big": torch.zeros(MIB)}, 1, channel="adapter12")
        else:
            with pytest.raises(objcomm.ProtocolError) as caught:
                objcomm.recv_object(0, channel="adapter13")
            assert "'adapter12'" in str(caught.value) and "'adapter13'" in str(caught.value)
        still_works(rank)

    run_ranks(ranks, backend=backend)


def test_ranks_with_different_limits_get_an_error_that_names_both(backend: str) -> None:
    def ranks(rank: int) -> None:
        objcomm.configure(max_bytes=1000_000 + rank)
        for obj in (1, torch.zeros(200_000, dtype=torch.uint8)):
            with within(10), pytest.raises(objcomm.ProtocolError) as caught:
                if rank == 0:
                    objcomm.send_object(obj, 1)
                else:
                    objcomm.recv_object(0)
            assert "1000000" in str(caught.value) and "1000001" in str(caught.value), caught.value

    run_ranks(ranks, backend=backend)


def test_ranks_whose_limits_come_to_differ_later(backend: str) -> None:
    def ranks(rank: int) -> None:
        still_works(rank)
        if rank == 1:
            objcomm.configure(max_bytes=123_456_789)
            with within(10), pytest.raises(objcomm.ProtocolError, match="123456789"):
                objcomm.recv_object(0)
        else:
            with within(10), pytest.raises((objcomm.ProtocolError, objcomm.PeerError)) as caught:
                objcomm.send_object(torch.zeros(MIB), 1, timeout=3)
                objcomm.send_object("next", 1, timeout=3)
            assert backend == "strict" or "123456789" in str(caught.value)

    run_ranks(ranks, backend=backend)


@pytest.mark.parametrize("nbytes", [0, 10, 72, 200, 65536])
def test_a_frame_that_is_not_ours(nbytes: int) -> None:
    def ranks(rank: int) -> None:
        gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
        still_works(rank)
        if rank == 0:
            gloo.send([torch.full((nbytes,), 0xAB, dtype=torch.uint8)], 1, TAG).wait()
            with within(5), pytest.raises((objcomm.ProtocolError, objcomm.PeerError)):
                objcomm.send_object(1, 1)
                objcomm.send_object(2, 1)
        else:
            for _ in range(2):
                with within(5), pytest.raises(objcomm.ProtocolError):
                    objcomm.recv_object(0)
            with within(1), pytest.raises(objcomm.ProtocolError, match="closed since"):
                objcomm.send_object(1, 0)

    run_ranks(ranks, backend="gloo")


def test_what_goes_wrong_in_one_group_leaves_the_others_usable() -> None:
    def ranks(rank: int) -> None:
        other = dist.new_group([0, 1])
        if rank == 1:
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(0, group=other, timeout=0.2)
        still_works(rank)
        if rank == 0:
            with within(5), pytest.raises(objcomm.PeerError):
                objcomm.send_object(1, 1, group=other)

    run_ranks(ranks)


def test_a_receive_that_waits_too_long(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 1:
            with within(5), pytest.raises(objcomm.TransferTimeout) as caught:
                objcomm.recv_object(0, channel="adapter3", timeout=0.3)
            error = caught.value
            assert isinstance(error, TimeoutError)
            assert (error.peer, error.channel, error.phase) == (0, "adapter3", "head")
            for word in ("peer 0", "'adapter3'", "phase head"):
                assert word in str(error)
            with within(1), pytest.raises(objcomm.PeerError, match="closed since TransferTimeout"):
                objcomm.recv_object(0)

    run_ranks(ranks, backend=backend)


def test_a_send_that_waits_too_long(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            work = objcomm.isend_object({"t": torch.zeros(MIB)}, 1, channel="adapter3")
            with within(5), pytest.raises(objcomm.TransferTimeout) as caught:
                work.wait(timeout=0.3)
            assert (caught.value.peer, caught.value.channel) == (1, "adapter3")
        else:
            time.sleep(1)

    run_ranks(ranks, backend=backend)


def test_the_time_out_comes_from_the_call_then_configure_then_the_group() -> None:
    def ranks(rank: int) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        if rank == 1:
            objcomm.configure(timeout=0.4)
            with within(3), pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(0, group=groups[0])
            objcomm.configure(timeout=20)
            with within(3), pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(0, group=groups[1], timeout=0.4)
            objcomm.configure(timeout=None)
            with within(6), pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(0)

    run_ranks(ranks, group_timeout=3)


@pytest.mark.parametrize("how", ["exit", "kill", "raise"])
def test_a_dead_peer_is_noticed_at_once(how: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object("alive", 1)
            time.sleep(0.3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(3)
            dist.destroy_process_group()
            os._exit(1)
        assert objcomm.recv_object(0) == "alive"
        ahead = objcomm.irecv_object(0)
        with within(5), pytest.raises(objcomm.PeerError) as caught:
            ahead.wait()
        assert caught.value.peer == 0
        for call in (lambda: objcomm.recv_object(0), lambda: objcomm.send_object(torch.zeros(MIB), 0)):
            with within(2), pytest.raises(objcomm.PeerError):
                call()

    run_ranks(ranks, may_die=(0,))


def test_a_peer_that_ends_says_goodbye_to_those_that_wait() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object("alive", 1)
            time.sleep(0.5)
            from objcomm.work import _leave

            _leave()
            return
        assert objcomm.recv_object(0) == "alive"
        with within(5), pytest.raises(objcomm.PeerError, match="rank 0 has left: its process ended"):
            objcomm.recv_object(0)

    run_ranks(ranks)


def test_a_peer_that_dies_in_the_middle_of_a_message() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            outgoing: Any = importlib.import_module("objcomm.outgoing")

            original = outgoing.post

            def die(pair: Any, *args: Any) -> Any:
                pair.link.send_segments = lambda segments: os._exit(5)
                return original(pair, *args)

            outgoing.post = die
            objcomm.send_object({"t": torch.zeros(MIB)}, 1)
        else:
            with within(5), pytest.raises(objcomm.PeerError):
                objcomm.recv_object(0)

    run_ranks(ranks, may_die=(0,))


def test_a_class_that_the_receiver_cannot_import(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            module = types.ModuleType("only_on_rank_0")
            exec("class Config:\n    pass\n", module.__dict__)
            sys.modules["only_on_rank_0"] = module
            objcomm.send_object({"cfg": [module.Config()], "big": torch.zeros(MIB)}, 1)
        else:
            with pytest.raises(objcomm.DecodeError) as caught:
                objcomm.recv_object(0)
            assert "only_on_rank_0" in str(caught.value) and "Config" in str(caught.value)
            assert caught.value.rank == 1 and caught.value.peer == 0
        still_works(rank)

    run_ranks(ranks, backend=backend)


def test_restricted_trust_on_either_side(backend: str) -> None:
    def ranks(rank: int) -> None:
        opaque = {"f": Holder(3), "big": torch.zeros(MIB)}
        objcomm.configure(trust="restricted" if rank == 1 else "cluster")
        if rank == 0:
            objcomm.send_object(opaque, 1)
        else:
            with pytest.raises(objcomm.TrustError):
                objcomm.recv_object(0)
        objcomm.configure(trust="restricted" if rank == 0 else "cluster")
        if rank == 0:
            with pytest.raises(objcomm.TrustError) as caught:
                objcomm.send_object(opaque, 1)
            assert caught.value.path == "obj['f']"
        else:
            with pytest.raises(objcomm.PeerError, match="TrustError") as told:
                objcomm.recv_object(0)
            assert told.value.path == "obj['f']"
        objcomm.configure(trust="restricted")
        still_works(rank)

    run_ranks(ranks, backend=backend)


def test_two_receivers_of_one_pair_with_different_channels_get_errors_not_mixed_data() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            for channel in ("a", "b"):
                objcomm.send_object(channel, 1, channel=channel)
            return
        second = objcomm.irecv_object(0, channel="b")
        first = objcomm.irecv_object(0, channel="a")
        for work in (first, second):
            with pytest.raises(objcomm.ProtocolError):
                work.wait()

    run_ranks(ranks)


def test_a_thread_that_finds_the_pair_busy_times_out_with_that_reason() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            time.sleep(1.5)
            objcomm.send_object("late", 1)
            return
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(objcomm.recv_object(0)))
        waiting.start()
        time.sleep(0.3)
        with within(1), pytest.raises(objcomm.TransferTimeout, match="another thread"):
            objcomm.recv_object(0, timeout=0.3)
        waiting.join()
        assert got == ["late"]

    run_ranks(ranks)


BAD_CALLS: list[dict[str, Any]] = [
    *({"timeout": wrong} for wrong in ("5", float("nan"), True, -1, [0])),
    *({"channel": channel} for channel in (None, 5, b"c", "c" * 1025)),
]
BAD_DEVICES: list[Any] = ["nonsense", "meta", 1.5, "cuda:97"]


def test_wrong_arguments_are_told_before_anything_is_posted() -> None:
    def ranks(rank: int) -> None:
        peer = 1 - rank
        for arguments in BAD_CALLS:
            for call in (objcomm.send_object, objcomm.isend_object, objcomm.exchange_objects):
                with pytest.raises(objcomm.UsageError):
                    call("x", peer, **arguments)
            for receive in (objcomm.recv_object, objcomm.irecv_object):
                with pytest.raises(objcomm.UsageError):
                    receive(peer, **arguments)
        for device in BAD_DEVICES:
            with pytest.raises(objcomm.UsageError, match="device"):
                objcomm.recv_object(peer, device=device)
        for settings in ({"timeout": "5"}, {"timeout": float("nan")}, {"timeout": 0}, {"max_bytes": 1 << 80}):
            with pytest.raises(objcomm.UsageError):
                objcomm.configure(**settings)
        still_works(rank)

    run_ranks(ranks)


def test_a_time_out_beyond_all_clocks_means_never() -> None:
    def ranks(rank: int) -> None:
        for timeout in (float("inf"), 1e10, 1e300):
            if rank == 0:
                objcomm.send_object(timeout, 1, timeout=timeout)
            else:
                assert objcomm.recv_object(0, timeout=timeout) == timeout
            objcomm.configure(timeout=timeout)
            still_works(rank)

    run_ranks(ranks)


def test_an_impatient_wait_beside_a_patient_one_harms_neither() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            time.sleep(1)
            objcomm.send_object("first", 1)
            objcomm.send_object("second", 1)
        else:
            first, second = objcomm.irecv_object(0), objcomm.irecv_object(0)
            got: list[Any] = []
            patient = threading.Thread(target=lambda: got.append(first.wait()))
            patient.start()
            time.sleep(0.2)
            for work in (first, second):
                for _ in range(2):
                    with within(1), pytest.raises(objcomm.TransferTimeout, match="another thread"):
                        work.wait(timeout=0.1)
            patient.join()
            assert got == ["first"]
            assert first.wait() == "first"
            assert second.wait() == "second"
        still_works(rank)

    run_ranks(ranks)


class Exits:
    """Leaves the interpreter when it is rebuilt."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_a_class_that_exits_while_it_is_rebuilt_leaves_the_pair_in_order(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object({"x": Exits(), "big": torch.zeros(MIB)}, 1)
        else:
            work = objcomm.irecv_object(0)
            with pytest.raises(SystemExit):
                work.wait()
            with pytest.raises(objcomm.DecodeError, match="interrupted"):
                work.wait()
        still_works(rank)

    run_ranks(ranks, backend=backend)


def test_a_forked_child_leaves_its_parents_connections_alone() -> None:
    def ranks(rank: int) -> None:
        still_works(rank)
        leave = importlib.import_module("objcomm.work")._leave
        a_forked_child_is_refused(lambda: objcomm.send_object("from a child", 1 - rank, timeout=2), leave)
        still_works(rank)

    run_ranks(ranks)
