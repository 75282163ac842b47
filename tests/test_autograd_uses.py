"""What is done with objects whose gradients travel: schedules, graphs that are used twice, modes, threads, bytes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import autograd
from tests.ranks import run_ranks


@pytest.fixture(params=["gloo", "strict"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weights(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 4)


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3 + i, 4, generator=generator) for i in range(count)]


def assert_grads(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for got, wanted in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-5)


def alone(batches: list[torch.Tensor]) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Both stages after a backward pass for each batch, in one process."""
    first, second = weights(1), weights(2)
    for x in batches:
        second(first(x).tanh()).pow(2).sum().backward()
    return first, second


@contextmanager
def measured() -> Iterator[dict[str, int]]:
    """What the counters of this process rose by."""
    before = objcomm.stats()
    rose: dict[str, int] = {}
    yield rose
    rose.update({name: value - before[name] for name, value in objcomm.stats().items()})


ORDERS = {
    "first in, first out": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "last in, first out": ([3, 2, 1, 0], [3, 2, 1, 0]),
    "the peer in another order": ([2, 0, 3, 1], [0, 1, 2, 3]),
    "both in orders of their own": ([1, 3, 0, 2], [3, 2, 1, 0]),
}


def test_several_objects_in_flight_whatever_the_order(backend: str) -> None:
    def ranks(rank: int) -> None:
        for name, (there, here) in ORDERS.items():
            batches = inputs(4)
            wanted = alone(batches)[rank]
            mine = weights(rank + 1)
            if rank == 0:
                # Two channels: which object a gradient belongs to does not hang on the name.
                sent = [autograd.isend_object([mine(x).tanh()], 1, channel=f"c{i % 2}") for i, x in enumerate(batches)]
                for i in here:
                    sent[i].backward()
            else:
                received = [autograd.irecv_object(0, channel=f"c{i % 2}") for i in range(4)]
                works = []
                for i in there:
                    mine(received[i].obj[0]).pow(2).sum().backward()
                    works.append(received[i].isend_grads())
                for work in works:
                    work.wait()
            assert_grads(mine, wanted)
            assert objcomm.exchange_objects(name, 1 - rank) == name

    run_ranks(ranks, 2, backend=backend)


def test_a_graph_that_is_used_again(backend: str) -> None:
    def ranks(rank: int) -> None:
        first, second = weights(1), weights(2)
        hidden = first(inputs(1)[0]).tanh()
        for factor in (1, 2, 3):
            (second(hidden).sum() * factor).backward(retain_graph=True)
        mine = weights(rank + 1)
        if rank == 0:
            sent = autograd.send_object([mine(inputs(1)[0]).tanh()], 1)
            for step in range(3):
                sent.backward(retain_graph=step < 2)
            assert_grads(mine, first)
            with pytest.raises(objcomm.UsageError, match="was run already"):
                sent.backward()
        else:
            received = autograd.recv_object(0)
            loss = mine(received.obj[0]).sum()
            for factor in (1, 2, 3):
                (loss * factor).backward(retain_graph=True)
                received.send_grads()
                assert received.leaves[0].grad is None
            assert_grads(mine, second)

    run_ranks(ranks, 2, backend=backend)


def test_two_receivers_and_a_use_here_are_summed(backend: str) -> None:
    def ranks(rank: int) -> None:
        models = [weights(seed) for seed in range(3)]
        hidden = models[0](inputs(1)[0])
        torch.autograd.backward([model(hidden.tanh()).sum() for model in models[1:]] + [hidden.pow(3).sum()])
        mine = weights(rank)
        if rank == 0:
            hidden = mine(inputs(1)[0])
            sent = [autograd.isend_object({"h": hidden.tanh()}, dst) for dst in (1, 2)]
            autograd.backward(sent, [hidden.pow(3).sum()])
        else:
            received = autograd.recv_object(0)
            mine(received.obj["h"]).sum().backward()
            received.send_grads()
        assert_grads(mine, models[rank])

        # The same, one after the other.
        mine.zero_grad()
        if rank == 0:
            hidden = mine(inputs(1)[0])
            tensor = hidden.tanh()
            left, right = (autograd.isend_object({"h": tensor}, dst) for dst in (1, 2))
            right.backward(retain_graph=True)
            left.backward(retain_graph=True)
            hidden.pow(3).sum().backward()
        else:
            received = autograd.recv_object(0)
            mine(received.obj["h"]).sum().backward()
            received.send_grads()
        assert_grads(mine, models[rank])

    run_ranks(ranks, 3, backend=backend)


def test_through_a_chain_of_ranks(backend: str) -> None:
    def ranks(rank: int) -> None:
        models = [weights(seed) for seed in range(3)]
        x = inputs(1)[0]
        models[2](models[1](models[0](x).tanh()).tanh()).sum().backward()
        mine = weights(rank)
        received = autograd.recv_object(rank - 1) if rank else None
        out = mine(received.obj if received else x)
        if rank < 2:
            sent = autograd.send_object(out.tanh(), rank + 1)
            sent.backward()
        else:
            out.sum().backward()
        if received:
            received.send_grads()
        assert_grads(mine, models[rank])

    run_ranks(ranks, 3, backend=backend)


def test_a_change_in_place_after_sending_changes_no_gradient(backend: str) -> None:
    def ranks(rank: int) -> None:
        x = inputs(1)[0]
        mine, wanted = weights(1), weights(1)
        wanted(x).pow(2).sum().backward()
        if rank == 0:
            out = mine(x)
            sent = autograd.send_object([out, out[1:]], 1)
            out.mul_(3)
            out[1:].zero_()
            sent.backward()
            assert_grads(mine, wanted)
        else:
            received = autograd.recv_object(0)
            whole, _ = received.obj
            whole.pow(2).sum().backward()
            received.send_grads()

    run_ranks(ranks, 2, backend=backend)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_in_a_mode_that_records_nothing(backend: str, mode: Any) -> None:
    def ranks(rank: int) -> None:
        wanted = alone(inputs(1))[rank]
        mine = weights(rank + 1)
        if rank == 0:
            hidden = mine(inputs(1)[0]).tanh()
            with mode():
                sent = autograd.send_object(hidden, 1)
            sent.backward()
        else:
            with mode():
                received = autograd.recv_object(0)
            assert received.obj.requires_grad
            mine(received.obj).pow(2).sum().backward()
            with torch.no_grad():
                received.send_grads()
        assert_grads(mine, wanted)

    run_ranks(ranks, 2, backend=backend)


def test_a_gradient_of_another_dtype_is_converted(backend: str) -> None:
    def ranks(rank: int) -> None:
        mine, wanted = weights(1), weights(1)
        wanted(inputs(1)[0]).sum().backward()
        if rank == 0:
            sent = autograd.send_object([mine(inputs(1)[0])], 1)
            sent.backward()
            assert_grads(mine, wanted)
        else:
            received = autograd.recv_object(0)
            (leaf,) = received.leaves
            leaf.grad_dtype = None
            leaf.grad = torch.ones_like(leaf, dtype=torch.bfloat16)
            received.send_grads()

    run_ranks(ranks, 2, backend=backend)


def test_only_the_gradients_that_are_needed_come_back(backend: str) -> None:
    def ranks(rank: int) -> None:
        window = 4096 if backend == "strict" else 0
        for count, numel in ((1, 10), (3, 1000), (2, 500_000)):
            leaves = [torch.randn(numel, requires_grad=True) for _ in range(count)]
            unused = [torch.randn(50_000, requires_grad=True), torch.randn(50_000), torch.arange(50_000)]
            if rank == 0:
                sent = autograd.send_object([leaves, unused], 1)
                with measured() as rose:
                    sent.backward()
                nbytes = rose["bytes_received"]
                assert rose["bytes_sent"] == 0
                assert all(leaf.grad is not None for leaf in leaves)
                assert unused[0].grad is None
            else:
                received = autograd.recv_object(0)
                torch.stack([leaf.sum() for leaf in received.obj[0]]).sum().backward()
                with measured() as rose:
                    received.send_grads()
                nbytes = rose["bytes_sent"]
                assert rose["bytes_received"] == 0
            needed = 4 * count * numel
            assert needed <= nbytes <= needed + max(window, 512), (count, numel, nbytes)

        # Nothing is needed: a head says so.
        if rank == 0:
            autograd.send_object([torch.ones(100_000, requires_grad=True)], 1).backward()
        else:
            received = autograd.recv_object(0)
            with measured() as rose:
                received.send_grads()
            assert rose["messages_sent"] == 1
            assert rose["bytes_sent"] <= max(window, 256)

    run_ranks(ranks, 2, backend=backend)


def test_handles_that_are_dropped(backend: str) -> None:
    def ranks(rank: int) -> None:
        wanted = alone(inputs(3)[1:2])[rank]
        mine = weights(rank + 1)
        if rank == 0:
            graphs = []
            kept = None
            for i, x in enumerate(inputs(3)):
                hidden = mine(x).tanh()
                graphs.append(weakref.ref(hidden))
                sent = autograd.isend_object([hidden], 1)
                if i == 1:
                    kept = sent
            del sent, hidden
            assert kept is not None
            kept.backward()
            assert_grads(mine, wanted)
            gc.disable()
            assert objcomm.recv_object(1) == "over"
            assert [graph() for graph in graphs[:1]] == [None]
        else:
            for i in range(3):
                received = autograd.recv_object(0)
                loss = mine(received.obj[0]).pow(2).sum()
                if i < 2:  # the gradients of the first one come to nobody
                    (grads,) = torch.autograd.grad(loss, received.leaves, retain_graph=True)
                    if i == 1:
                        loss.backward()
                    else:
                        received.leaves[0].grad = grads
                    received.isend_grads()
                del received, loss
            objcomm.send_object("over", 0)
            assert_grads(mine, wanted)

    run_ranks(ranks, 2, backend=backend)


def test_threads_take_their_own_gradients() -> None:
    def ranks(rank: int) -> None:
        batches = inputs(8)
        wanted = alone(batches)[rank]
        mine = weights(rank + 1)
        if rank == 0:
            sent = [autograd.isend_object(mine(x).tanh(), 1) for x in batches]
            failed: list[BaseException] = []
            lock = threading.Lock()

            def take(i: int) -> None:
                try:
                    roots = sent[i]._take(20)
                    with lock:
                        torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=take, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert failed == []
        else:
            received = [autograd.recv_object(0) for _ in range(8)]
            for i in (5, 0, 7, 2, 1, 6, 3, 4):
                mine(received[i].obj).pow(2).sum().backward()
                received[i].send_grads()
        assert_grads(mine, wanted)

    run_ranks(ranks, 2, backend="gloo")


def test_large_gradients_keep_their_memory_while_others_arrive(backend: str) -> None:
    def ranks(rank: int) -> None:
        parameters = [torch.nn.Parameter(torch.full((300_000,), float(i))) for i in range(4)]
        for step in range(3):
            for i, parameter in enumerate(parameters):
                if rank == 0:
                    autograd.send_object({"p": parameter}, 1).backward()
                else:
                    received = autograd.recv_object(0)
                    (received.obj["p"] * (10 * i + step + 1)).sum().backward()
                    received.send_grads()
        for i, parameter in enumerate(parameters):
            if rank == 0:
                assert parameter.grad is not None
                assert set(parameter.grad.tolist()) == {float(3 * 10 * i + 6)}
            else:
                assert parameter.grad is None

    run_ranks(ranks, 2, backend=backend)


def test_objects_and_gradients_in_one_direction(backend: str) -> None:
    """Two ranks with two stages each: rank 0 has the first and the third, so each direction carries both."""

    def ranks(rank: int) -> None:
        models = [weights(seed) for seed in range(4)]
        mine = [weights(seed) for seed in range(4)]
        batches = inputs(3)
        for x in batches:
            for model in models:
                x = model(x).tanh()
            x.pow(2).sum().backward()
        handles: list[list[Any]] = [[], [], [], []]
        arrived: list[list[Any]] = [[], [], [], []]
        others = []
        # Each rank starts its sends as early as it can; the receives are in an order of their own.
        if rank == 0:
            arrived[2] = [autograd.irecv_object(1, channel="2") for _ in batches]
            handles[0] = [autograd.isend_object([mine[0](x).tanh()], 1, channel="1") for x in batches]
            for received in arrived[2]:
                handles[2].append(autograd.isend_object([mine[2](received.obj[0]).tanh()], 1, channel="3"))
            reply = objcomm.irecv_object(1, channel="reply")
            for i in (1, 0, 2):
                handles[2][i].backward()
                others.append(arrived[2][i].isend_grads())
            for i in (2, 0, 1):
                handles[0][i].backward()
            # The reply comes last, and its receive was posted before the gradients came.
            objcomm.send_object("question", 1)
            assert reply.wait() == "reply"
        else:
            arrived[1] = [autograd.irecv_object(0, channel="1") for _ in batches]
            arrived[3] = [autograd.irecv_object(0, channel="3") for _ in batches]
            for received in arrived[1]:
                handles[1].append(autograd.isend_object([mine[1](received.obj[0]).tanh()], 0, channel="2"))
            for received in arrived[3]:
                mine[3](received.obj[0]).tanh().pow(2).sum().backward()
                others.append(received.isend_grads())
            for i in (0, 2, 1):
                handles[1][i].backward()
                others.append(arrived[1][i].isend_grads())
            assert objcomm.recv_object(0) == "question"
            objcomm.send_object("reply", 0, channel="reply")
        for work in others:
            work.wait()
        for stage in (0, 2) if rank == 0 else (1, 3):
            assert_grads(mine[stage], models[stage])

    run_ranks(ranks, 2, backend=backend)


def test_in_a_group_and_beside_other_objects(backend: str) -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return
        wanted = alone(inputs(1))[rank - 1]
        mine = weights(rank)
        if rank == 1:
            sent = autograd.isend_object(mine(inputs(1)[0]).tanh(), group=group, group_dst=1, channel="h")
            objcomm.send_object("beside", 2, group=group)
            assert objcomm.recv_object(2, group=group) == "answer"
            sent.backward()
        else:
            received = autograd.irecv_object(1, group=group, channel="h")
            assert objcomm.recv_object(1, group=group) == "beside"
            mine(received.wait()).pow(2).sum().backward()
            objcomm.isend_object("answer", group=group, group_dst=0)
            received.send_grads()
        assert_grads(mine, wanted)

    run_ranks(ranks, 3, backend=backend)
