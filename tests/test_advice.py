"""The mistakes that people make first: each error says what to do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import objcomm
from objcomm import autograd
from tests.ranks import run_ranks


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def _with_grad() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("make", "path", "advice"),
    [
        (threading.Lock, "obj['cfg'].held", "leave it out, or let __getstate__ of the class around it leave it out"),
        (lambda: (i for i in range(3)), "obj['cfg'].held", "send a list of what it gives"),
        (Path(__file__).open, "obj['cfg'].held", "send its name or its content"),
    ],
    ids=["lock", "generator", "file"],
)
def test_what_cannot_be_sent_names_what_to_send_instead(make: Callable[[], Any], path: str, advice: str) -> None:
    def body(rank: int) -> tuple[str, str | None]:
        if rank == 0:
            with pytest.raises(objcomm.EncodeError) as caught:
                objcomm.send_object({"cfg": Holder(make())}, 1)
            return str(caught.value), caught.value.path
        with pytest.raises(objcomm.PeerError) as refused:
            objcomm.recv_object(0)
        return str(refused.value), refused.value.path

    (mine, where), (theirs, there) = run_ranks(body, 2)
    assert where == there == path
    assert f"; {advice}" in mine
    assert "the error is raised on that rank too" in theirs


def test_a_gradient_that_would_be_lost_names_what_carries_gradients() -> None:
    def body(rank: int) -> str:
        with pytest.raises(objcomm.ObjcommError) as caught:
            objcomm.move_object([_with_grad()] if rank == 0 else None, 0, 1, forbid_grad=True)
        return str(caught.value)

    advice = "; detach it if no gradient is needed; objcomm.autograd sends objects whose gradients come back"
    assert run_ranks(body, 2)[0].endswith(advice)


def test_ranks_that_take_another_for_the_source_are_told_how_to_find_out() -> None:
    def body(rank: int) -> str:
        with pytest.raises(objcomm.ObjcommError) as caught:
            objcomm.broadcast_object(rank, src=rank, timeout=1.0 + rank)
        return str(caught.value)

    assert "with the same arguments: objcomm.debug() compares them first" in run_ranks(body, 2)[0]


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_peer_that_is_gone_sends_the_reader_there(backend: str) -> None:
    def body(rank: int) -> str:
        objcomm.exchange_objects(rank, 1 - rank)
        if rank == 0:
            os._exit(3)
        with pytest.raises(objcomm.PeerError) as caught:
            objcomm.recv_object(0)
        return str(caught.value)

    assert run_ranks(body, 2, backend=backend, may_die=[0])[1].endswith(
        "; what rank 0 itself raised or printed says why"
    )


def test_two_that_only_receive_are_told_of_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> str:
        with pytest.raises(objcomm.ObjcommError) as caught:
            objcomm.recv_object(1 - rank, timeout=6.0 + rank)
        return str(caught.value)

    text = run_ranks(body, 2)[0]
    assert "either rank 1 makes no call that matches this one, and the report on stderr says" in text
    report = capfd.readouterr().out.split("--- output of rank 1")[0]
    assert "recv_object waits for message 0 from rank 1, since" in report
    assert "  | " in report
    assert "recv_object waits for message 0 from rank 0, since" in report


def test_gradients_that_nobody_takes_name_the_call_that_is_missing() -> None:
    def body(rank: int) -> str:
        if rank == 0:
            autograd.send_object(_with_grad(), 1)
            time.sleep(3.0)
            return ""
        received = autograd.recv_object(0)
        received.obj.sum().backward()
        with pytest.raises(objcomm.TransferTimeout) as caught:
            received.send_grads(timeout=1.0)
        return str(caught.value)

    assert run_ranks(body, 2, backend="gloo")[1].endswith(
        "; the rank that sent the object has to call backward() on its handle"
    )
