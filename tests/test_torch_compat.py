"""torch.distributed's object calls over objcomm: they do what torch's own do, on every kind of group and value."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import torch_compat
from objcomm.codec import encode
from objcomm.torch_compat.calls import _copy_of
from objcomm.torch_compat.groups import NAMES
from objcomm.torch_compat.mistakes import AsTorch
from tests.ranks import run_ranks
from tests.same import assert_arrived
from tests.values import VALUES

BACKENDS = ["gloo", "strict"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs(name: str) -> None:
    ours = list(inspect.signature(getattr(torch_compat, name)).parameters.values())
    theirs = list(inspect.signature(getattr(dist, name)).parameters.values())
    if "weights_only" not in (each.name for each in theirs):
        last = ours.pop()
        assert (last.name, last.default) == ("weights_only", False)
    assert [(each.name, each.kind, each.default) for each in ours] == [
        (each.name, each.kind, each.default) for each in theirs
    ]


def everything(obj: Any, rank: int) -> dict[str, Any]:
    """What arrives on this rank of three when rank 1 has an object: by every one of the calls."""
    arrived: dict[str, Any] = {}
    has = rank == 1
    objects = [obj, rank] if has else [None, None]
    torch_compat.broadcast_object_list(objects, src=1)
    arrived["broadcast"] = objects
    outputs: list[Any] = [None]
    torch_compat.scatter_object_list(outputs, [obj, obj, obj] if has else None, src=1)
    arrived["scatter"] = outputs
    everybodys: list[Any] = [None] * 3
    torch_compat.all_gather_object(everybodys, obj if has else rank)
    arrived["all_gather"] = everybodys
    if rank == 2:
        gathered: list[Any] = [None] * 3
        torch_compat.gather_object(rank, gathered, dst=2)
        arrived["gather"] = gathered
        received = [None, None]
        assert torch_compat.recv_object_list(received, src=1) == 1
        arrived["send"] = received
    else:
        torch_compat.gather_object(obj if has else rank, dst=2)
        if has:
            torch_compat.send_object_list([obj, 1], dst=2)
    return arrived


def test_every_value_arrives_by_every_call(backend: str) -> None:
    def ranks(rank: int) -> list[str]:
        refused = []
        for name, make in VALUES:
            torch.manual_seed(11)
            value = make()
            try:
                with AsTorch(False):
                    _copy_of(value)
            except objcomm.EncodeError:
                refused.append(name)
                continue
            arrived = everything(value if rank == 1 else None, rank)
            expected: dict[str, Any] = {
                "broadcast": [value, 1],
                "scatter": [value],
                "all_gather": [0, value, 2],
                "gather": [0, value, 2],
                "send": [value, 1],
            }
            for call, got in arrived.items():
                assert_arrived(got, expected[call])
        return refused

    # What pickle refuses: functions and classes without a name of their own.
    refused = ["lambda", "local class", "defaultdict of a function"]
    assert run_ranks(ranks, 3, backend=backend, timeout=150) == [refused] * 3


def test_subgroups_global_ranks_and_ranks_of_the_group(backend: str) -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([1, 3, 2])
        if rank == 0:
            return
        mine = dist.get_rank(group)
        members = dist.get_process_group_ranks(group)
        big = {"rank": rank, "t": torch.full((200_000,), float(rank))}
        for root in members:
            of_group = dist.get_group_rank(group, root)
            named: Any
            for named in ({"src": root}, {"group_src": of_group}):
                objects: list[Any] = [big, None] if rank == root else [None, None]
                torch_compat.broadcast_object_list(objects, group=group, **named)
                assert objects[0]["rank"] == root and objects[0]["t"][-1] == root
                outputs: list[Any] = [None, "stays"]
                torch_compat.scatter_object_list(
                    outputs, [(root, i) for i in range(3)] if rank == root else None, group=group, **named
                )
                assert outputs == [(root, mine), "stays"]
            for named in ({"dst": root}, {"group_dst": of_group}):
                gathered: list[Any] = [None] * 4
                torch_compat.gather_object(rank, gathered if rank == root else None, group=group, **named)
                assert gathered == ([*members, None] if rank == root else [None] * 4)
        everybodys: list[Any] = [None] * 3
        torch_compat.all_gather_object(everybodys, rank, group)
        assert everybodys == members
        if rank == members[0]:
            torch_compat.send_object_list((1, "two"), members[1], group)
            torch_compat.send_object_list([3], group=group, group_dst=2, use_batch=True)
        elif rank == members[1]:
            pair: list[Any] = [None, None]
            assert torch_compat.recv_object_list(pair, group=group, group_src=0) == members[0]
            assert pair == [1, "two"]
        else:
            one: list[Any] = [None]
            source = torch_compat.recv_object_list(one, members[0], group, torch.device("cpu"), use_batch=True)
            assert (source, one) == (members[0], [3])
        # Global rank 0, which they all mean where none is named, is not in this group.
        for call in (
            lambda: torch_compat.broadcast_object_list([1], group=group),
            lambda: torch_compat.gather_object(1, [None] * 3, group=group),
            lambda: torch_compat.scatter_object_list([None], [1, 2, 3], group=group),
        ):
            with pytest.raises(ValueError, match="rank 0, which"):
                call()

    run_ranks(ranks, 4, backend=backend)


def test_a_group_of_one(backend: str) -> None:
    def ranks(rank: int) -> None:
        objects = [[1], {}]
        torch_compat.broadcast_object_list(objects)
        assert objects == [[1], {}]
        for fill in (
            lambda out: torch_compat.all_gather_object(out, {"a": [1]}),
            lambda out: torch_compat.gather_object({"a": [1]}, out),
            lambda out: torch_compat.scatter_object_list(out, [{"a": [1]}]),
        ):
            out = [None]
            fill(out)
            assert out == [{"a": [1]}]

    run_ranks(ranks, 1, backend=backend)


def test_numbers_of_other_types_are_ranks_as_in_torch() -> None:
    def ranks(rank: int) -> None:
        one = np.int64(1)
        objects = ["x" if rank == 1 else None]
        torch_compat.broadcast_object_list(objects, src=one)
        assert objects == ["x"]
        if rank == 0:
            torch_compat.send_object_list(["y"], torch.tensor(1))  # type: ignore[arg-type]
        else:
            assert torch_compat.recv_object_list(objects, group_src=True - one) == 0
            assert objects == ["y"]
        with pytest.raises(TypeError):
            torch_compat.broadcast_object_list(["x"], src="1")  # type: ignore[arg-type]

    run_ranks(ranks, 2)


def test_a_ranks_own_object_is_a_copy_as_in_torch() -> None:
    def ranks(rank: int) -> None:
        for calls in (torch_compat, dist):
            base = torch.arange(4.0, requires_grad=True)
            mine: dict[str, Any] = {
                "t": base * 2,
                "big": torch.zeros(200_000),
                "list": [1],
                "a": np.zeros(3),
                "views": (base, base[1:]),
            }
            everybodys: list[Any] = [None] * 2
            calls.all_gather_object(everybodys, mine)
            gathered: list[Any] = [None] * 2
            calls.gather_object(mine, gathered if rank == 0 else None)
            outputs: list[Any] = [None]
            calls.scatter_object_list(outputs, [mine, mine] if rank == 0 else None)
            copies = [everybodys[rank]] + ([gathered[0], outputs[0]] if rank == 0 else [])
            for copy in copies:
                assert copy["t"].grad_fn is None and copy["t"].is_leaf and copy["t"].requires_grad
                copy["big"] += 1
                copy["list"].append(2)
                copy["a"] += 1
            assert not mine["big"].any() and mine["list"] == [1] and not mine["a"].any()
            if calls is torch_compat:  # torch loses what views share
                assert_arrived(copies[0]["views"], tuple(each.detach().requires_grad_() for each in mine["views"]))

    run_ranks(ranks, 2)


def test_modules_and_the_states_of_optimizers(backend: str) -> None:
    """What torch's tests of DistributedDataParallel and of optimizers gather and broadcast, without accelerators."""

    def ranks(rank: int) -> None:
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        models: list[Any] = [None] * 2
        torch_compat.all_gather_object(models, model)
        assert_arrived(models[rank].state_dict(), model.state_dict())
        assert not torch.equal(models[0][0].weight, models[1][0].weight)
        states = [optimizer.state_dict() if rank == 1 else None]
        torch_compat.broadcast_object_list(states, src=1)
        assert states[0] is not None
        fresh = torch.optim.Adam(models[1].parameters(), lr=0.5)
        fresh.load_state_dict(states[0])
        assert fresh.param_groups[0]["lr"] == 0.1
        if rank == 1:
            assert_arrived(fresh.state_dict(), optimizer.state_dict())

    run_ranks(ranks, 2, backend=backend)


def test_one_message_for_a_list_and_none_of_it_pickled() -> None:
    def ranks(rank: int) -> None:
        before = objcomm.stats()
        objects = [{"n": 1, "t": torch.ones(8)}, "name", 3] if rank == 0 else [None] * 3
        if rank == 0:
            torch_compat.send_object_list(objects, 1)
        else:
            torch_compat.recv_object_list(objects, 0)
        after = objcomm.stats()
        kind = "sent" if rank == 0 else "received"
        assert after[f"messages_{kind}"] - before[f"messages_{kind}"] == 1
        assert after[f"bytes_{kind}"] - before[f"bytes_{kind}"] < 400
        assert encode(objects).opaque is False

    run_ranks(ranks, 2)


def test_groups_that_exist_in_one_process_only_are_torchs() -> None:
    def ranks(rank: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        before = objcomm.stats()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        objects = ["mine"]
        torch_compat.broadcast_object_list(objects)
        assert objects == ["mine"]
        assert torch_compat.groups.served(None) is None
        with pytest.raises(objcomm.UsageError, match="weights_only"):
            torch_compat.broadcast_object_list(objects, weights_only=True)
        assert objcomm.stats() == before

    run_ranks(ranks, 1, backend=None)
