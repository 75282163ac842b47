"""The same mistakes, the same types of exceptions as torch's own calls raise; and what torch leaves hanging is told."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import torch_compat
from objcomm.torch_compat import mistakes
from objcomm.torch_compat.groups import _torchs
from tests.ranks import run_ranks

BACKENDS = ["gloo", "strict"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class _Torchs:
    """torch's own functions, whatever is installed."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _torchs[name]


def _local() -> object:
    class Local:
        pass

    return Local()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not now")


# What every one of two ranks does wrong before anything is sent. The first argument has the calls, the second the rank.
MISTAKES: dict[str, Callable[[Any, int], Any]] = {
    "send to oneself": lambda d, rank: d.send_object_list([1], rank),
    "send to oneself in the group": lambda d, rank: d.send_object_list([1], group_dst=rank),
    "send to nobody": lambda d, rank: d.send_object_list([1]),
    "send to two": lambda d, rank: d.send_object_list([1], 1 - rank, group_dst=1 - rank),
    "send with a device that is none": lambda d, rank: d.send_object_list([1], 1 - rank, device="nonsense"),
    "receive from oneself": lambda d, rank: d.recv_object_list([None], rank),
    "receive from anybody": lambda d, rank: d.recv_object_list([None]),
    "receive from two": lambda d, rank: d.recv_object_list([None], 1 - rank, group_src=1 - rank),
    "broadcast from two": lambda d, rank: d.broadcast_object_list([1], 0, group_src=0),
    "broadcast from a rank that is none": lambda d, rank: d.broadcast_object_list([1], 2, dist.group.WORLD),
    "broadcast to a device that is none": lambda d, rank: d.broadcast_object_list([1], 0, device="nonsense"),
    "gather to two": lambda d, rank: d.gather_object(1, [None, None], 0, group_dst=0),
    "gather without a list": lambda d, rank: d.gather_object(1, None, rank),
    "gather into an empty list": lambda d, rank: d.gather_object(1, [], rank),
    "gather with a list elsewhere": lambda d, rank: d.gather_object(1, [None, None], 1 - rank),
    "scatter from two": lambda d, rank: d.scatter_object_list([None], [1, 2], 0, group_src=0),
    "scatter into nothing": lambda d, rank: d.scatter_object_list([], [1, 2]),
    "scatter into no list": lambda d, rank: d.scatter_object_list((None,), [1, 2]),
    "a lock": lambda d, rank: d.all_gather_object([None] * 2, {"lock": [threading.Lock()]}),
    "a local class": lambda d, rank: d.all_gather_object([None] * 2, [_local()]),
    "a lambda": lambda d, rank: d.all_gather_object([None] * 2, lambda: 0),
    "a generator": lambda d, rank: d.all_gather_object([None] * 2, (i for i in range(3))),
    "a module of Python": lambda d, rank: d.all_gather_object([None] * 2, threading),
    "an object that refuses": lambda d, rank: d.all_gather_object([None] * 2, Unpicklable()),
    "a short list": lambda d, rank: d.all_gather_object([None], rank),
    "a tuple": lambda d, rank: d.all_gather_object((None, None), rank),
    "no list": lambda d, rank: d.broadcast_object_list(None, rank),
}


def _raised(call: Callable[[Any, int], Any], calls: Any, rank: int) -> Exception | None:
    try:
        call(calls, rank)
    except Exception as error:
        return error
    return None


def test_the_same_mistakes_are_told_by_the_same_types() -> None:
    def ranks(rank: int) -> list[tuple[str, str, str]]:
        found = []
        for name, call in MISTAKES.items():
            theirs, ours = _raised(call, _Torchs(), rank), _raised(call, torch_compat, rank)
            if theirs is None or not isinstance(ours, type(theirs)):
                found.append((name, repr(theirs), repr(ours)))
        everybodys = [None, None]
        torch_compat.all_gather_object(everybodys, rank)
        assert everybodys == [0, 1]
        return found

    assert run_ranks(ranks, 2) == [[], []]


def test_without_a_process_group() -> None:
    for call in (
        lambda d: d.send_object_list([1], 1),
        lambda d: d.recv_object_list([1], 1),
        lambda d: d.broadcast_object_list([1]),
        lambda d: d.all_gather_object([1], 1),
        lambda d: d.gather_object(1, [1]),
        lambda d: d.scatter_object_list([1], [1]),
    ):
        for calls in (_Torchs(), torch_compat):
            with pytest.raises(ValueError, match="process group"):
                call(calls)


OUTSIDE: list[Callable[[Any, Any], Any]] = [
    lambda d, group: d.send_object_list([1], 1, group),
    lambda d, group: d.send_object_list([1], group=group, group_dst=1),
    lambda d, group: d.recv_object_list([1], 1, group),
    lambda d, group: d.recv_object_list([1], group=group, group_src=1),
    lambda d, group: d.broadcast_object_list([1], 0, group),
    lambda d, group: d.broadcast_object_list([1], group=group, group_src=0),
    lambda d, group: d.all_gather_object([1], 1, group),
    lambda d, group: d.gather_object(1, None, 0, group),
    lambda d, group: d.gather_object(1, None, group=group, group_dst=0),
    lambda d, group: d.scatter_object_list([1], [1], 0, group),
    lambda d, group: d.scatter_object_list([1], [1], group=group, group_src=0),
]


def test_a_rank_outside_of_the_group_is_told_as_torch_tells_it() -> None:
    def outcome(call: Callable[[Any, Any], Any], calls: Any, group: Any) -> tuple[Any, ...]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = call(calls, group)
            except Exception as error:
                return type(error), str(error)
        return result, [(each.category, str(each.message)) for each in caught]

    def ranks(rank: int) -> None:
        group = dist.new_group([0, 1])
        if rank < 2:
            return
        outcomes = []
        for call in OUTSIDE:
            theirs = outcome(call, _Torchs(), group)
            assert outcome(call, torch_compat, group) == theirs
            outcomes.append(theirs)
        for result, caught in outcomes[5:7]:
            assert result is None and "does not belong to the given group" in caught[0][1]

    run_ranks(ranks, 3)


def test_lists_of_other_lengths_and_empty_ones_are_told_on_both_sides_and_the_next_call_works(backend: str) -> None:
    def ranks(rank: int) -> None:
        for sent, room in ((3, 2), (1, 2), (0, 1), (1, 0), (0, 0)):
            objects: list[Any] = [{"i": i} for i in range(sent)] if rank == 0 else [None] * room
            if sent == 0:
                text = "object_list of rank 0 is empty"
            else:
                text = f"object_list has {room} items, and rank 0 has sent {sent}"
            with pytest.raises(ValueError, match=text) if rank > 0 or sent == 0 else _nothing():
                torch_compat.broadcast_object_list(objects, 0)
            if rank < 2:
                with pytest.raises(ValueError, match=text) if rank > 0 or sent == 0 else _nothing():
                    if rank == 0:
                        torch_compat.send_object_list(objects, 1)
                    else:
                        torch_compat.recv_object_list(objects, 0)
            assert rank == 0 or objects == [None] * room  # nothing is filled by halves
            objects = [rank]
            torch_compat.broadcast_object_list(objects, 2)
            assert objects == [2]

    run_ranks(ranks, 3, backend=backend)


def _nothing() -> Any:
    return warnings.catch_warnings()  # a context that does nothing to errors


def test_what_cannot_be_sent_fails_on_every_rank_at_once_and_the_next_call_works(backend: str) -> None:
    """torch's receivers would wait until their time-out."""

    def ranks(rank: int) -> None:
        bad: Any = {"a": [threading.Lock()]}
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: torch_compat.broadcast_object_list([0, bad] if rank == 1 else [0, 0], 1), "obj[1]['a'][0]"),
            (lambda: torch_compat.all_gather_object([0] * 3, bad if rank == 1 else 0), "obj['a'][0]"),
            (
                lambda: torch_compat.gather_object(bad if rank == 1 else 0, [0] * 3 if rank == 2 else None, 2),
                "obj['a'][0]",
            ),
            (lambda: torch_compat.scatter_object_list([0], [0, 0, bad] if rank == 1 else None, 1), "obj['a'][0]"),
        ]
        if rank != 0:
            send, receive = torch_compat.send_object_list, torch_compat.recv_object_list
            calls.append((lambda: send([bad], 2) if rank == 1 else receive([0], 1), "obj[0]['a'][0]"))
        for number, (call, path) in enumerate(calls):
            started = time.monotonic()
            with pytest.raises(TypeError if rank == 1 else objcomm.PeerError) as caught:
                call()
            error: Any = caught.value
            assert time.monotonic() - started < 5
            assert isinstance(error, objcomm.EncodeError if rank == 1 else objcomm.PeerError)
            if not (number == 2 and rank == 0):  # its own object was taken; what it is told is that another's was not
                assert path in str(error)
            assert "rank 1" in str(error)
        everybodys: list[Any] = [None] * 3
        torch_compat.all_gather_object(everybodys, rank)
        assert everybodys == [0, 1, 2]

    run_ranks(ranks, 3, backend=backend)


def test_a_mistake_of_the_source_of_a_scatter_is_told_to_all(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ValueError, match="source"):
                _Torchs().scatter_object_list([None], None)
        for wrong in (None, [1], [1, 2, 3, 4]):
            with pytest.raises(ValueError if rank == 0 else objcomm.PeerError):
                torch_compat.scatter_object_list([None], wrong if rank == 0 else None)
        out = [None]
        torch_compat.scatter_object_list(out, ["a", "b", "c"] if rank == 0 else None)
        assert out == ["abc"[rank]]

    run_ranks(ranks, 3, backend=backend)


def test_a_rank_that_never_calls_is_named() -> None:
    def ranks(rank: int) -> str:
        group = dist.new_group([0, 1, 2])
        dist.barrier()
        text = ""
        if rank != 1:
            started = time.monotonic()
            with pytest.raises(objcomm.TransferTimeout) as caught:
                torch_compat.all_gather_object([None] * 3, rank, group)
            text = str(caught.value)
            assert time.monotonic() - started < 10
        dist.barrier()
        return text

    texts = run_ranks(ranks, 3, env={"OBJCOMM_TIMEOUT": "2"}, timeout=60)
    assert ["rank 1 has not made this call" in text for text in texts] == [True, False, True]


def test_a_class_that_the_receiver_does_not_have() -> None:
    def ranks(rank: int) -> None:
        import types

        objects: list[Any] = [None]
        if rank == 0:
            import sys

            module = types.ModuleType("only_here")
            sys.modules["only_here"] = module
            exec("class Thing: pass", vars(module))
            objects = [module.Thing()]
        with pytest.raises(ModuleNotFoundError) if rank == 1 else _nothing() as caught:
            torch_compat.broadcast_object_list(objects)
        if rank == 1:
            assert isinstance(caught.value, objcomm.DecodeError)
            assert "only_here.Thing" in str(caught.value)
        torch_compat.broadcast_object_list(objects, 1)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("other", [other for others in mistakes._PICKLES.values() for other in others])
def test_such_an_error_can_be_sent_itself(other: type[Exception]) -> None:
    """torch's checkpoints send the errors of each rank to the others."""
    for kind, others in mistakes._PICKLES.items():
        if other not in others:
            continue
        error = kind("what", rank=1, path="obj[0]", hint="do that")
        error.__cause__ = other("why")
        both = mistakes.of_torchs_type(error)
        assert isinstance(both, kind) and isinstance(both, other)
        assert str(both) == str(error) == "what [path obj[0], rank 1]; do that"
        again = pickle.loads(pickle.dumps(both))
        assert type(again) is type(both)
        assert (str(again), again.path) == (str(both), "obj[0]")
