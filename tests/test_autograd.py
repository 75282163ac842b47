"""Gradients across two ranks: every parameter's gradient is that of one process."""

from __future__ import annotations

import pytest
import torch

from objcomm import autograd
from tests.autograd_cases import CASES, Case, Parameters, parameters
from tests.ranks import run_ranks


@pytest.fixture(params=["gloo", "strict"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def alone(case: Case) -> tuple[Parameters, Parameters]:
    """The parameters of both sides after a backward pass in one process."""
    first, second = parameters(1), parameters(2)
    loss = case.consume(case.produce(first), second)
    loss.backward()
    return first, second


def assert_same_grads(mine: Parameters, theirs: Parameters, what: str) -> None:
    for name, parameter in theirs.items():
        got, wanted = mine[name].grad, parameter.grad
        assert (got is None) == (wanted is None), f"{what}: {name}: {got} instead of {wanted}"
        if got is not None and wanted is not None:
            assert got.layout == wanted.layout, f"{what}: {name}"
            torch.testing.assert_close(got.to_dense(), wanted.to_dense(), rtol=1e-5, atol=1e-5, msg=f"{what}: {name}")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_every_object_of_the_table_has_the_gradients_of_one_process(backend: str) -> None:
    def ranks(rank: int) -> None:
        for case in CASES:
            first, second = alone(case)
            if rank == 0:
                mine = parameters(1)
                sent = autograd.send_object(case.produce(mine), 1, channel=case.name)
                sent.backward()
                assert_same_grads(mine, first, case.name)
            else:
                mine = parameters(2)
                received = autograd.recv_object(0, channel=case.name)
                assert len(received.leaves) == case.leaves, case.name
                assert all(leaf.requires_grad and leaf.is_leaf for leaf in received.leaves), case.name
                case.consume(received.obj, mine).backward()
                assert sum(leaf.grad is not None for leaf in received.leaves) == case.back, case.name
                received.send_grads()
                assert_same_grads(mine, second, case.name)

    assert len(CASES) >= 20
    run_ranks(ranks, 2, backend=backend, timeout=120)
