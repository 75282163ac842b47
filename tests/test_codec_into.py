"""Receiving into an object that exists."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from objcomm.codec import encode
from objcomm.config import Trust
from objcomm.errors import DecodeError
from tests.loopback import plan_of
from tests.same import assert_same

LARGE = 1 << 18


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


class Module:
    """Travels as a pickle."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)


def receive(obj: object, into: object, *, trust: Trust = "cluster", threshold: int = 1 << 19) -> Any:
    """Through the codec into an object, as a transport would do it. Returns the result and the number of segments that
    went straight into it."""
    encoded = encode(obj, threshold=threshold)
    plan = plan_of(encoded, trust=trust)
    targets = plan.targets(into)
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    segments = []
    for target, segment in zip(targets, encoded.segments, strict=True):
        arrived = torch.empty_like(segment) if target is None else target
        assert arrived.dtype is torch.uint8 and arrived.shape == segment.shape
        segments.append(arrived.copy_(segment))
    return plan.build(inline, segments), sum(target is not None for target in targets)


def _zeros_like(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return torch.zeros_like(obj).requires_grad_(obj.requires_grad)
    return np.zeros_like(obj)


# -- filling ---------------------------------------------------------------------------------------------------------


def test_tensors_and_arrays_are_filled_where_they_are() -> None:
    sent = {"a": torch.randn(3), "b": [torch.randn(LARGE), 5, ("x", np.arange(4.0))], "c": None, "n": np.arange(LARGE)}
    into: Any = {
        "n": np.zeros(LARGE, np.int64),
        "c": 7,
        "b": [torch.zeros(LARGE), -1, ("y", np.zeros(4))],
        "a": torch.zeros(3),
    }
    result, straight = receive(sent, into)
    assert straight == 2
    assert_same(sent, result)
    assert result is not into
    assert result["a"] is into["a"] and result["b"][0] is into["b"][0] and result["b"][2][1] is into["b"][2][1]
    assert result["n"] is into["n"]
    assert_same(sent["n"], into["n"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: {"k": {1: x}},
        lambda x: OrderedDict(a=x),
        lambda x: deque([1, x], maxlen=3),
        lambda x: Batch([x], y="y"),
        lambda x: Pair(1, x),
        lambda x: [[], {}, (), x],
    ],
)
@pytest.mark.parametrize("threshold", [1, 1 << 19])
def test_every_container_is_looked_into(wrap: Callable[[Any], Any], threshold: int) -> None:
    sent, target = torch.randn(100), torch.zeros(100)
    result, straight = receive(wrap(sent), wrap(target), threshold=threshold, trust="restricted")
    assert straight == (threshold == 1)
    assert_same(wrap(sent), result)
    assert torch.equal(sent, target)


TARGETS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "contiguous": (lambda: torch.zeros(512, 1024), True),
    "a part of another": (lambda: torch.zeros(600, 1024)[50:562], True),
    "with gaps": (lambda: torch.zeros(512, 2048)[:, ::2], False),
    "transposed": (lambda: torch.zeros(1024, 512).t(), False),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(512, 1024)), True),
    "result": (lambda: torch.zeros(512, 1024, requires_grad=True) * 1, True),
    "inference": (lambda: _in_inference(), True),
    "shared": (lambda: torch.zeros(512, 1024).share_memory_(), True),
}


def _in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(512, 1024)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_every_kind_of_target(name: str, large: bool, inference: bool) -> None:
    make, direct = TARGETS[name]
    target = make()
    target = target if large else (torch.nn.Parameter(target[:3, :5]) if name == "parameter" else target[:3, :5])
    sent = torch.randn(target.shape, requires_grad=True)
    with torch.inference_mode(inference):
        result, straight = receive(sent, target)
    assert result is target
    assert straight == (direct and large)
    assert torch.equal(sent.detach(), target.detach())


def test_a_transposed_tensor_goes_straight_into_one_that_lies_alike() -> None:
    sent, target = torch.randn(512, 1024).t(), torch.zeros(512, 1024).t()
    result, straight = receive(sent, target)
    assert (straight, result is target) == (1, True)
    assert torch.equal(sent, target)


def test_filling_is_a_change_that_autograd_notices() -> None:
    for size in (3, LARGE):
        target = torch.ones(size)
        product = target * torch.ones(size, requires_grad=True)
        receive(torch.ones(size), target)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_views_of_one_memory_fill_views_of_one_memory() -> None:
    x, y = torch.randn(LARGE), torch.zeros(LARGE)
    result, _ = receive([x, x[7:], x[:5]], [y, y[7:], y[:5]])
    assert result[0] is y
    assert torch.equal(x, y)


def test_columns_of_one_matrix_are_filled_independently() -> None:
    target = torch.zeros(50, 4)
    sent = [torch.randn(50) for _ in range(3)]
    receive(sent, [target[:, 0], target[:, 1], target[:, 3]])
    assert torch.equal(target, torch.stack([sent[0], sent[1], torch.zeros(50), sent[2]], 1))


def test_the_same_tensor_twice_fills_one_tensor() -> None:
    x, y = torch.randn(5), torch.zeros(5)
    result, _ = receive([x, x], [y, y])
    assert result[0] is result[1] is y
    assert torch.equal(x, y)


def test_attributes_and_parameters() -> None:
    sent = torch.nn.Parameter(torch.randn(LARGE))
    sent.tag = "sent"  # type: ignore[attr-defined]
    target = torch.nn.Parameter(torch.zeros(LARGE))
    result, straight = receive({"w": sent}, {"w": target})
    assert (result["w"] is target, straight) == (True, 1)
    assert torch.equal(sent, target) and target.tag == "sent"  # type: ignore[attr-defined]
    buffer = torch.nn.Buffer(torch.zeros(3))
    result, _ = receive(torch.ones(3), buffer)
    assert result is buffer and buffer.tolist() == [1, 1, 1]


def test_a_state_dict() -> None:
    one, other = (torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600)) for _ in range(2))
    _, straight = receive(one.state_dict(), other.state_dict())
    assert straight == 1
    assert_same(dict(one.state_dict()), dict(other.state_dict()))


def test_what_has_no_tensors() -> None:
    assert receive({"a": [1, 2], "b": "x"}, {"a": [0, 0], "b": None})[0] == {"a": [1, 2], "b": "x"}
    assert receive((1, {2}), (0, set()))[0] == (1, {2})
    result, _ = receive([Module(), torch.ones(3)], [None, torch.zeros(3)])
    assert result[0].weight.tolist() == [1, 1, 1]


def test_empty_tensors() -> None:
    target = [torch.empty(0), np.empty((3, 0))]
    result, _ = receive([torch.empty(0), np.empty((3, 0))], target)
    assert result[0] is target[0] and result[1] is target[1]


def test_a_target_on_another_device_than_the_bytes() -> None:
    target = torch.empty(LARGE, device="meta")
    with pytest.raises(DecodeError, match="more than plain memory"):
        receive(torch.ones(LARGE), target)


# -- what does not match ---------------------------------------------------------------------------------------------

_X = torch.zeros(20)

MISMATCHES: dict[str, tuple[Any, Any, str, str]] = {
    "dtype": (
        {"a": [torch.zeros(3)]},
        {"a": [torch.zeros(3, dtype=torch.int64)]},
        "obj['a'][0]",
        r"torch.int64 of shape \[3\], received is torch.float32 of shape \[3\]",
    ),
    "shape": ([torch.zeros(3, 4)], [torch.zeros(4, 3)], "obj[0]", r"shape \[4, 3\], received is .* of shape \[3, 4\]"),
    "array of another dtype": ([np.zeros(3)], [np.zeros(3, "f4")], "obj[0]", "float32 .* received is float64"),
    "array of another shape": ([np.zeros(3)], [np.zeros((3, 1))], "obj[0]", r"shape \[3, 1\]"),
    "array for tensor": ([torch.zeros(3)], [np.zeros(3)], "obj[0]", "received is a tensor"),
    "tensor for array": ([np.zeros(3)], [torch.zeros(3)], "obj[0]", "received is an array"),
    "nothing for tensor": ({"a": torch.zeros(3)}, {"a": None}, "obj['a']", "into has a NoneType"),
    "tensor for a number": ([3, torch.zeros(3)], [torch.zeros(3), torch.zeros(3)], "obj[0]", "received is an int"),
    "tensor for a number, nothing else": ([3], [torch.zeros(3)], "obj[0]", "received is an int"),
    "list for a number": ([3], [[3]], "obj[0]", "into has a list"),
    "list for tuple": (((torch.zeros(3),),), ([torch.zeros(3)],), "obj[0]", "into has a list, received is a tuple"),
    "too short": ([torch.zeros(3)] * 2, [torch.zeros(3)], "obj", "into has 1 items, received are 2"),
    "a key is missing": ({"a": torch.zeros(3), "b": 1}, {"a": torch.zeros(3)}, "obj", "into has no key 'b'"),
    "a key too much": ({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": 1}, "obj", "received has no key 'b'"),
    "another class": ([Batch(torch.zeros(3))], [Pair(torch.zeros(3), 1)], "obj[0]", "Pair, received is .*Batch"),
    "an attribute is missing": (Batch(_X), dataclasses.replace(Batch(_X)), "obj.y", "into has a list"),
    "one for two": ([torch.zeros(3), torch.zeros(3)], [_X[:3]] * 2, "obj[1]", r"same object as at obj\[1\]\[0\]"),
    "two for one": ([_X, _X], [torch.zeros(20), torch.zeros(20)], "obj[1]", r"the same object as at obj\[1\]\[0\]"),
    "expanded": ([torch.zeros(3)], [torch.zeros(1).expand(3)], "obj[0]", "share memory"),
    "windows": ([torch.zeros(3, 2)], [torch.zeros(9).as_strided((3, 2), (1, 1))], "obj[0]", "share memory"),
    "read-only": ([np.zeros(3)], [np.broadcast_to(np.zeros(3), 3)], "obj[0]", "read-only"),
    "sparse": ([torch.eye(3).to_sparse()], [torch.eye(3).to_sparse()], "obj[0]", "sparse_coo.* cannot be filled"),
    "into sparse": ([torch.eye(3)], [torch.eye(3).to_sparse()], "obj[0]", "more than plain memory"),
    "overlap": ([torch.zeros(5), torch.zeros(5)], [_X[:5], _X[3:8]], "obj[1]", r"shares memory with obj\[1\]\[0\]"),
    "overlap at another distance": ([_X[:5], _X[3:8]], [_X[:5], _X[2:7]], "obj[1]", "another distance"),
    "overlap with other steps": ([_X[:6], _X[:6:2]], [_X[:6], _X[:3]], "obj[1]", "shares memory"),
    "a tensor for what is pickled": ([Module()], [torch.zeros(3)], "obj[0]", "'pickle'"),
    "a container for what is pickled": ([Module()], [[torch.zeros(3)]], "obj[0]", "into has a list"),
    "a set of tensors": ([frozenset([_X])], [frozenset([_X])], "obj[0]", "no order"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_named_and_nothing_is_touched(name: str) -> None:
    sent, into, path, text = MISMATCHES[name]
    if name == "an attribute is missing":
        into.y = [1]
    guard = torch.zeros(2)
    with pytest.raises(DecodeError, match=text) as caught:
        receive([torch.ones(2), sent], [guard, into], threshold=1)
    assert caught.value.path == path.replace("obj", "obj[1]", 1)
    assert guard.tolist() == [0, 0]


def test_a_target_without_memory() -> None:
    target = torch.zeros(100)
    target.untyped_storage().resize_(0)
    with pytest.raises(DecodeError, match="freed or shrunk"):
        receive(torch.ones(100), target)


def test_targets_only_where_the_kind_of_device_agrees() -> None:
    encoded = encode(torch.ones(LARGE))
    from objcomm.codec import parse

    plan = parse(encoded.skeleton, inline_bytes=0, segments=[(LARGE * 4, True)], max_bytes=1 << 30)
    target = torch.zeros(LARGE)
    assert plan.targets(target) == [None]
    assert plan.build(torch.empty(0, dtype=torch.uint8), [encoded.segments[0].clone()]) is target
    assert float(target.sum()) == LARGE
