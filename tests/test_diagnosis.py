"""What a rank tells when nothing moves: on a time-out, on SIGUSR1, and when asked."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import diagnosis
from objcomm.wire import card
from tests.ranks import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "strict"])


def _signal_later(seconds: float) -> None:
    """SIGUSR1 to this process while its main thread waits in a backend; the test harness gives the signal back."""
    faulthandler.unregister(signal.SIGUSR1)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()


@BACKENDS
def test_ranks_that_disagree_on_the_order_of_calls_are_explained(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(rank: int) -> None:
        if rank == 0:
            objcomm.send_object(1, 1, channel="first")
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(1, channel="gradient", timeout=6.0)
        else:
            objcomm.recv_object(0, channel="first")
            with pytest.raises(objcomm.ObjcommError):
                objcomm.recv_object(0, channel="batch", timeout=7.5)

    run_ranks(body, 2, backend=backend)
    out = capfd.readouterr().out.split("--- output of rank 1")[0]
    assert "recv_object waits for message 0 from rank 1 on channel 'gradient', since" in out
    assert "s of 6 s; called at" in out
    assert "in body" in out
    assert "nothing received yet; last sent message 0 on channel 'first' at" in out
    # It had waited for half of its own time-out by then, and had said so.
    assert "what rank 1 last said:" in out
    assert "recv_object waits for message 1 from rank 0 on channel 'batch'" in out


def test_a_peer_that_is_elsewhere_has_said_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        objcomm.exchange_objects(rank, 1 - rank)
        if rank == 0:
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.send_object([1], 1, channel="lonely", timeout=0.5)

    run_ranks(body, 2)
    out = capfd.readouterr().out
    assert "send_object waits for rank 1 to take message 1 on channel 'lonely'" in out
    assert "1 sent and not seen to be taken, the first is message 1 on channel 'lonely'" in out
    assert "rank 1 has said nothing" in out
    assert "SIGUSR1 makes it tell" in out


@BACKENDS
def test_a_peer_that_was_never_here_is_not_to_be_sent_a_signal_that_would_end_it(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            return ""
        with pytest.raises(objcomm.TransferTimeout) as caught:
            objcomm.recv_object(1, timeout=0.5)
        return str(caught.value)

    text = run_ranks(body, 2, backend=backend)[0]
    assert "; either rank 1 makes no call that matches this one, and the report on stderr says" in text
    out = capfd.readouterr().out
    assert "rank 1 has never come to a call of objcomm in group '0'" in out
    assert "SIGUSR1" not in out


def test_ranks_that_ask_for_it_can_be_asked_before_their_first_call(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        subprocess.run(
            [sys.executable, "-c", "import objcomm, os, signal, time; os.kill(os.getpid(), 10); time.sleep(1)"],
            env={**os.environ, "OBJCOMM_DIAGNOSIS": "1"},
            check=True,
        )

    run_ranks(body, 1)
    out = capfd.readouterr().out
    assert "has exchanged nothing yet; its main thread is at <string>:1 in <module>" in out


def test_lightning_keeps_the_signal_of_slurm() -> None:
    def body(rank: int) -> bool:
        faulthandler.unregister(signal.SIGUSR1)
        sys.modules["lightning"] = types.ModuleType("lightning")
        objcomm.exchange_objects(rank, 1 - rank)
        # The rest of it is there: long waits are told to the peers.
        assert "objcomm-diagnosis" in [thread.name for thread in threading.enumerate()]
        return signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    assert run_ranks(body, 2, env={"SLURM_JOB_ID": "7"}) == [True, True]


def test_a_rank_elsewhere_tells_its_line_and_who_called_it() -> None:
    def body(rank: int) -> str:
        objcomm.exchange_objects(rank, 1 - rank)

        def inner() -> str:
            return objcomm.report()

        return inner()

    for text in run_ranks(body, 2):
        assert re.search(r"its main thread is at \S+:\d+ in inner, called at \S+:\d+ in body, called at ", text)


def test_a_wait_of_a_call_among_several_ranks_names_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(objcomm.TransferTimeout) as caught:
            objcomm.gather_objects(rank, dst=0, channel="losses", timeout=1.0)
        return str(caught.value)

    text = run_ranks(body, 2)[0]
    assert "; every rank of the call must make it, with the same arguments: objcomm.debug() compares them first" in text
    out = capfd.readouterr().out
    assert "gather_objects waits for message 0 from rank 1 of gather to 0 on channel 'losses', since" in out
    assert "1 receive posted of gather to 0 on channel 'losses'" in out


def test_a_wait_for_gradients_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> str:
        from objcomm import autograd

        if rank == 1:
            autograd.recv_object(0, channel="stage")
            return ""
        sent = autograd.send_object(torch.ones(2, requires_grad=True) * 2, 1, channel="stage")
        with pytest.raises(objcomm.TransferTimeout) as caught:
            sent.backward(timeout=1.0)
        return str(caught.value)

    text = run_ranks(body, 2)[0]
    assert "channel 'stage'" in text
    assert text.endswith("run its backward pass and call send_grads()")
    out = capfd.readouterr().out
    assert "backward waits for gradients from rank 1 of the object that was sent on channel 'stage', since" in out
    assert "does not wait in objcomm" not in out


@BACKENDS
def test_sigusr1_prints_while_the_main_thread_is_in_the_backend(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            _signal_later(1.5)
            return objcomm.recv_object(1, channel="late")
        time.sleep(4.0)
        objcomm.send_object("came", 0, channel="late")
        return None

    start = time.monotonic()
    assert run_ranks(body, 2, backend=backend)[0] == "came"
    assert time.monotonic() - start >= 4.0
    out = capfd.readouterr().out
    assert "recv_object waits for message 0 from rank 1 on channel 'late'" in out


def test_the_programs_own_handler_stays() -> None:
    def body(rank: int) -> list[int]:
        faulthandler.unregister(signal.SIGUSR1)
        got: list[int] = []

        def mine(number: int, frame: Any) -> None:
            got.append(number)

        signal.signal(signal.SIGUSR1, mine)
        assert objcomm.exchange_objects(rank, 1 - rank) == 1 - rank
        assert signal.getsignal(signal.SIGUSR1) is mine
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        return got

    assert run_ranks(body, 2) == [[signal.SIGUSR1]] * 2


def test_a_handler_that_comes_later_has_the_signal_to_itself(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> list[int]:
        faulthandler.unregister(signal.SIGUSR1)
        objcomm.exchange_objects(rank, 1 - rank)
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        return got

    assert run_ranks(body, 2) == [[signal.SIGUSR1]] * 2
    assert "objcomm on rank" not in capfd.readouterr().out


def test_a_handler_below_python_stays() -> None:
    def body(rank: int) -> bool:
        # The harness has faulthandler print stacks on SIGUSR1, of which Python's own table knows nothing.
        objcomm.exchange_objects(rank, 1 - rank)
        return signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

    assert run_ranks(body, 2) == [True, True]


def test_whoever_was_to_be_woken_up_by_signals_still_is() -> None:
    def body(rank: int) -> bytes:
        faulthandler.unregister(signal.SIGUSR1)
        there, here = os.pipe()
        os.set_blocking(here, False)
        signal.set_wakeup_fd(here)
        signal.signal(signal.SIGUSR2, lambda number, frame: None)
        objcomm.exchange_objects(rank, 1 - rank)
        os.kill(os.getpid(), signal.SIGUSR2)
        return os.read(there, 16)

    assert run_ranks(body, 2) == [bytes([signal.SIGUSR2])] * 2


def test_it_can_be_switched_off() -> None:
    def body(rank: int) -> list[str]:
        faulthandler.unregister(signal.SIGUSR1)
        objcomm.exchange_objects(rank, 1 - rank)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        return [thread.name for thread in threading.enumerate() if thread.name == "objcomm-diagnosis"]

    assert run_ranks(body, 2, env={"OBJCOMM_DIAGNOSIS": "0"}) == [[], []]


def test_switched_off_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> None:
        if rank == 0:
            with pytest.raises(objcomm.TransferTimeout):
                objcomm.recv_object(1, timeout=0.3)

    run_ranks(body, 2, env={"OBJCOMM_DIAGNOSIS": "0"})
    assert "objcomm" not in capfd.readouterr().out


def test_a_forked_child_has_the_signals_default_back() -> None:
    def body(rank: int) -> int:
        faulthandler.unregister(signal.SIGUSR1)
        objcomm.exchange_objects(rank, 1 - rank)
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert objcomm.exchange_objects(rank, 1 - rank) == 1 - rank
        return os.waitpid(child, 0)[1]

    assert run_ranks(body, 2) == [signal.SIGUSR1] * 2


def test_the_report_of_a_rank_that_waits_for_nothing() -> None:
    def body(rank: int) -> str:
        objcomm.exchange_objects(rank, 1 - rank, channel="both")
        text = objcomm.report()
        dist.barrier()
        return text

    for rank, text in enumerate(run_ranks(body, 2)):
        assert f"objcomm on rank {rank}, process" in text
        assert "it does not wait in objcomm; its main thread is at" in text
        assert "in body" in text
        assert "last received message 0 on channel 'both' at" in text
        assert "last sent message 0 on channel 'both' at" in text


def test_threads_and_handles_are_told_apart() -> None:
    def body(rank: int) -> str:
        if rank == 1:
            objcomm.send_object("a", 0, channel="a")
            objcomm.recv_object(0)
            objcomm.send_object("b", 0, channel="b")
            return ""
        first, second = (objcomm.irecv_object(1, channel=name) for name in "ab")
        assert first.wait() == "a"
        thread = threading.Thread(target=second.wait, name="helper")
        thread.start()
        time.sleep(0.5)
        text = objcomm.report()
        objcomm.send_object(None, 1)
        thread.join()
        return text

    text = run_ranks(body, 2)[0]
    assert "wait() of a handle waits for message 1 from rank 1 on channel 'b'" in text
    assert "thread helper" in text
    assert text.count(" waits ") == 1


def test_a_store_that_does_not_answer_is_asked_once_not_for_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs out of time is about to raise an error, and must not wait for minutes before it."""
    asked: list[str] = []

    class Frozen:
        def check(self, keys: list[str]) -> bool:
            asked.extend(keys)
            time.sleep(1)
            return False

    frozen = Frozen()
    pairs: Any = [
        types.SimpleNamespace(peer=peer, group_name="g", link=types.SimpleNamespace(store=frozen, alive=True))
        for peer in range(1, 6)
    ]
    monkeypatch.setattr(card, "_REASON_SECONDS", 0.1)
    began = time.monotonic()
    lines = diagnosis.lines_of_peers(pairs, 0.5)
    assert time.monotonic() - began < 1
    assert asked == ["objcomm/said/1"]
    assert lines == [
        "  the store of group 'g', where ranks leave word, does not answer: the process that keeps it is frozen or gone"
    ]
