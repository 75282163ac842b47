"""A backward pass on one side only, messages that are no gradients, objects that arrive with fewer tensors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import objcomm
from objcomm import autograd
from objcomm.autograd import mailbox
from objcomm.codec import encode
from tests.loopback import plan_of
from tests.ranks import run_ranks
from tests.test_codec_layouts import KINDS
from tests.values import VALUES


@pytest.fixture(params=["gloo", "strict"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _hidden() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def test_a_backward_pass_on_the_senders_side_only_times_out(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            sent = autograd.send_object({"h": _hidden()}, 1, channel="hidden")
            start = time.monotonic()
            with pytest.raises(objcomm.TransferTimeout, match=r"the gradients of an object .* did not come") as caught:
                sent.backward(timeout=0.5)
            assert 0.4 < time.monotonic() - start < 5
            assert (caught.value.channel, caught.value.rank, caught.value.peer) == ("hidden", 0, 1)
            assert "'hidden'" in str(caught.value)
            with pytest.raises(objcomm.PeerError, match="closed since TransferTimeout") as again:
                sent.backward(timeout=0.5)
            assert again.value.channel == "hidden"
        else:
            assert autograd.recv_object(0, channel="hidden").obj["h"].requires_grad
            time.sleep(1.5)

    run_ranks(ranks, 2, backend=backend)


@pytest.mark.parametrize("waits", [False, True])
def test_a_backward_pass_on_the_receivers_side_only_times_out(backend: str, waits: bool) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            autograd.send_object({"h": _hidden()}, 1, channel="hidden")
            time.sleep(1.5)
        else:
            received = autograd.recv_object(0, channel="hidden")
            received.obj["h"].sum().backward()
            with pytest.raises(objcomm.TransferTimeout, match="could not be sent back") as caught:
                if waits:
                    received.isend_grads().wait(0.5)
                else:
                    received.send_grads(timeout=0.5)
            assert (caught.value.channel, caught.value.rank, caught.value.peer) == ("hidden", 1, 0)

    run_ranks(ranks, 2, backend=backend)


def test_a_receiver_that_leaves_is_told(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            sent = autograd.send_object({"h": _hidden()}, 1, channel="hidden")
            start = time.monotonic()
            with pytest.raises(objcomm.PeerError) as caught:
                sent.backward()
            assert caught.value.channel == "hidden"
            assert time.monotonic() - start < 20
        else:
            import os

            autograd.recv_object(0, channel="hidden")
            os._exit(3)

    run_ranks(ranks, 2, backend=backend, may_die=[1], group_timeout=30)


def test_an_object_where_gradients_are_due(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            sent = autograd.send_object({"h": _hidden()}, 1, channel="hidden")
            with pytest.raises(objcomm.ProtocolError, match="'other' arrived") as caught:
                sent.backward()
            assert caught.value.channel == "hidden"
            sent.backward()
            assert objcomm.recv_object(1) == "next"
        else:
            received = autograd.recv_object(0, channel="hidden")
            objcomm.send_object("an object", 0, channel="other")
            received.obj["h"].sum().backward()
            received.send_grads()
            objcomm.send_object("next", 0)

    run_ranks(ranks, 2, backend=backend)


def test_gradients_that_nobody_can_expect(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object({"h": _hidden()}, 1)
            with pytest.raises(objcomm.ProtocolError, match=r"'objcomm\.gradients' arrived"):
                objcomm.recv_object(1)
            assert objcomm.recv_object(1) == "next"
        else:
            received = autograd.recv_object(0)
            received.send_grads()
            objcomm.send_object("next", 0)

    run_ranks(ranks, 2, backend=backend)


def test_errors_between_other_objects_are_those_of_the_backward_pass(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            sent = autograd.send_object({"h": _hidden()}, 1, channel="hidden")
            assert objcomm.recv_object(1) == "first"
            assert objcomm.recv_object(1) == "second"
            with pytest.raises(objcomm.PeerError, match="generator") as caught:
                sent.backward()
            assert caught.value.channel == "hidden"
            sent.backward()
        else:
            received = autograd.recv_object(0, channel="hidden")
            received.obj["h"].sum().backward()
            objcomm.send_object("first", 0)
            grad: Any = received.leaves[0].grad
            grad.generator = (i for i in range(3))
            with pytest.raises(objcomm.EncodeError, match="generator"):
                received.send_grads()
            objcomm.send_object("second", 0)
            del grad.generator
            received.send_grads()

    run_ranks(ranks, 2, backend=backend)


BAD: list[tuple[str, Any, str]] = [
    ("no message of gradients", "text", "no message of gradients"),
    ("a wrong number", [0, 1, {1: torch.ones(3)}], "which requires none"),
    ("a wrong shape", [0, 1, {0: torch.ones(4)}], r"shape \[4\] came back for a tensor of shape \[3\]"),
    ("complex", [0, 1, {0: torch.ones(3, dtype=torch.complex64)}], "torch.complex64 came back"),
    ("nested", [0, 1, {0: torch.nested.nested_tensor([[1.0]], layout=torch.jagged)}], "nested tensor came back"),
    ("no tensor", [0, 1, {0: 1.0}], "no message of gradients"),
    ("an object that never was", [1 << 40, 1, {}], "no message of gradients"),
    ("another count", [0, 2, {0: torch.ones(3)}], "1 tensors of the object require grad, and 2 of what arrived"),
]


def test_what_comes_back_is_checked(backend: str) -> None:
    def ranks(rank: int) -> None:
        for name, message, text in BAD:
            if rank == 0:
                leaf = torch.ones(3, requires_grad=True)
                sent = autograd.send_object([leaf * 1], 1, channel=name)
                with pytest.raises(objcomm.ProtocolError, match=text) as caught:
                    sent.backward()
                assert caught.value.channel == name
                assert leaf.grad is None
                del sent
            else:
                received = autograd.recv_object(0, channel=name)
                message = [received._incoming.sequence, *message[1:]] if message[0] == 0 else message
                objcomm.send_object(message, 0, channel=mailbox.CHANNEL)

    run_ranks(ranks, 2, backend=backend)


def test_an_object_that_cannot_be_sent_and_gradients_that_cannot(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            with pytest.raises(objcomm.EncodeError, match="generator"):
                autograd.send_object({"h": _hidden(), "bad": (i for i in range(3))}, 1)
            sent = autograd.send_object({"h": _hidden()}, 1)
            with pytest.raises(objcomm.PeerError, match="did not come back") as caught:
                sent.backward()
            assert caught.value.path is not None
            sent.backward()
        else:
            with pytest.raises(objcomm.PeerError):
                autograd.recv_object(0)
            received = autograd.recv_object(0)
            received.obj["h"].sum().backward()
            (leaf,) = received.leaves
            grad: Any = leaf.grad
            grad.generator = (i for i in range(3))
            with pytest.raises(objcomm.EncodeError, match="generator"):
                received.send_grads()
            del grad.generator
            received.send_grads()

    run_ranks(ranks, 2, backend=backend)


class Forgetful:
    """What arrives is not made of what was sent."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class ForgetfulTensor(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _forgotten, (self.detach().as_subclass(torch.Tensor),)


def _forgotten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(ForgetfulTensor)


def test_a_tensor_that_arrives_without_its_history_is_an_error(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            sent = autograd.send_object([_hidden().as_subclass(ForgetfulTensor)], 1)
            with pytest.raises(objcomm.ProtocolError, match="1 tensors of the object require grad, and 0 of what"):
                sent.backward()
        else:
            autograd.recv_object(0).send_grads()

    run_ranks(ranks, 2, backend=backend)


def test_wrong_calls_are_told_before_anything_is_sent() -> None:
    def ranks(rank: int) -> None:
        with pytest.raises(objcomm.UsageError, match="timeout"):
            autograd.send_object(1, 1 - rank, timeout=-1)
        with pytest.raises(objcomm.UsageError, match="timeout"):
            autograd.recv_object(1 - rank, timeout=-1)
        with pytest.raises(objcomm.UsageError):
            autograd.send_object(1, rank)
        with pytest.raises(objcomm.UsageError):
            autograd.irecv_object(7)
        if rank == 0:
            sent = autograd.send_object([_hidden()], 1)
            with pytest.raises(objcomm.UsageError, match="twice"):
                autograd.backward([sent, sent])
            sent.backward()
        else:
            autograd.recv_object(0).send_grads()

    run_ranks(ranks, 2)


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|MaskedTensors|beta|prototype|quantized).*:UserWarning")
def test_both_ends_give_the_same_tensors_the_same_numbers() -> None:
    made: dict[str, Any] = {**dict(VALUES), **KINDS}
    numbers = 0
    for name, make in made.items():
        obj = make()
        objs = [obj]
        if isinstance(obj, torch.Tensor) and (obj.is_floating_point() or obj.is_complex()):
            leaf = obj.detach().requires_grad_()
            try:
                objs += [[leaf], [leaf, {"again": (leaf.clone(), leaf)}]]
            except (RuntimeError, NotImplementedError):
                objs += [[leaf]]  # a subclass that cannot be computed with
        for each in objs:
            encoded = encode(each)
            plan = plan_of(encoded)
            inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
            encoded.write_inline(inline)
            plan.build(inline, [segment.clone() for segment in encoded.segments])
            mine, theirs = encoded.requiring_grad(), plan.requiring_grad()
            assert mine.keys() == theirs.keys(), name
            assert all(type(mine[number]) is type(theirs[number]) for number in mine), name
            numbers += len(mine)
    assert numbers > 100
