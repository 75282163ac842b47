"""Many tensors at once: recognized as those of an earlier message, and folded into runs."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from objcomm import DecodeError, EncodeError
from objcomm.codec import Encoded, alike, codes, encode, parse
from tests.same import assert_same


def many(count: int = 40, start: int = 0) -> list[torch.Tensor]:
    return [torch.full((3,), float(start + index)) for index in range(count)]


def there(encoded: Encoded, skeleton: bytes | None = None) -> Any:
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    segments = [(segment.numel(), False) for segment in encoded.segments]
    plan = parse(
        encoded.skeleton if skeleton is None else skeleton,
        inline_bytes=encoded.inline_bytes,
        segments=segments,
        max_bytes=1 << 30,
    )
    return plan.build(inline, [segment.clone() for segment in encoded.segments])


def twice() -> list[Any]:
    tensors = many()
    return [tensors, {"again": tensors[5:30]}, tensors[::-1]]


SHAPES: dict[str, Callable[[], Any]] = {
    "a list": many,
    "a dict": lambda: {f"layer.{index}": tensor for index, tensor in enumerate(many())},
    "a dict of other keys": lambda: dict(zip([None, True, 7, 2.5, b"x", "y", *range(100, 116)], many(22), strict=True)),
    "nested": lambda: {"a": many(20), "b": {"c": many(17, 50), "d": [many(16), many(3)]}, "n": 3, "e": []},
    "deep": lambda: {"a": {"b": {"c": {"d": {"e": {"f": many()}}}}}},
    "two dicts": lambda: [{str(i): t for i, t in enumerate(many(20))}, {str(-i): t for i, t in enumerate(many(20))}],
    "the same list three times": lambda: [many(30)] * 3,
    "the same tensors in other lists": twice,
    "one tensor again and again": lambda: many(1) * 50,
    "a list with something else in it": lambda: [*many(20), 3, *many(20)],
    "parameters": lambda: [torch.nn.Parameter(tensor) for tensor in many()],
    "tensors as keys": lambda: dict(zip(many(20), many(20, 20), strict=True)),
    "of many sizes": lambda: [torch.arange(index) for index in range(40)],
    "large ones among them": lambda: [torch.zeros(1 << (index % 20)) for index in range(40)],
    "views of one tensor": lambda: list(torch.arange(64.0).view(32, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_arrives_is_what_was_sent(name: str) -> None:
    obj = SHAPES[name]()
    # The second and the third time, the tensors look like earlier ones.
    for _ in range(3):
        received = there(encode(obj))
        if name == "tensors as keys":
            assert_same(list(obj.items()), list(received.items()))
        else:
            assert_same(obj, received)


def test_the_order_is_kept() -> None:
    received = there(encode({"first": many(20), "second": many(20, 20)}))
    assert [tensor[0].item() for tensor in received["first"]] == list(range(20))
    assert [tensor[0].item() for tensor in received["second"]] == list(range(20, 40))


def test_a_tensor_that_occurs_twice_arrives_as_one() -> None:
    first, second, third = there(encode(twice()))
    assert all(mine is other for mine, other in zip(first[5:30], second["again"], strict=True))
    assert all(mine is other for mine, other in zip(first, reversed(third), strict=True))


def test_many_are_a_leaf_of_a_few_bytes() -> None:
    assert len(encode(many(1000)).skeleton) < len(encode(many(500)).skeleton) + 600
    names = {f"layer.{index}": tensor for index, tensor in enumerate(many(1000))}
    assert len(encode(names).skeleton) < 1000 * 12 + 1200


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 40), (40, 0), (1 << 31, 0), (40, 40)],
)
def test_a_run_beyond_the_table_is_refused(first: int, last: int) -> None:
    encoded = encode(many())
    run = msgpack.packb(msgpack.ExtType(codes.RUN, struct.pack("<II", 39, 0)))
    assert encoded.skeleton.endswith(run)
    forged = msgpack.packb(msgpack.ExtType(codes.RUN, struct.pack("<II", first, last)))
    with pytest.raises(DecodeError, match="a run of tensors from"):
        there(encoded, encoded.skeleton[: -len(run)] + forged)


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0", bytes(9)])
def test_a_run_of_another_length_is_refused(data: bytes) -> None:
    encoded = encode(many())
    run = msgpack.packb(msgpack.ExtType(codes.RUN, bytes(8)))
    with pytest.raises(DecodeError, match="a run of tensors described by"):
        there(encoded, encoded.skeleton[: -len(run)] + msgpack.packb(msgpack.ExtType(codes.RUN, data)))


def test_runs_cannot_ask_for_more_than_there_is() -> None:
    """A few bytes each must not make a list of all tensors each."""
    encoded = encode(many())
    run = msgpack.ExtType(codes.RUN, struct.pack("<II", 0, 39))
    with pytest.raises(DecodeError, match="more tensors than there are"):
        there(encoded, encoded.skeleton[: -len(msgpack.packb(run))] + msgpack.packb([run] * 2))


@pytest.mark.parametrize(
    "part",
    [
        [["a"], [1, 2]],
        [["a", "b"], [1]],
        [[["a"]], [1]],
        ["ab", [1, 2]],
        [{"a": 1}, [1]],
        [["a"]],
        [["a"], [1], 2],
        [[msgpack.ExtType(codes.RUN, bytes(8))], [1]],
    ],
)
def test_a_malformed_dict_of_tensors_is_refused(part: list[Any]) -> None:
    encoded = encode(many())
    run = msgpack.packb(msgpack.ExtType(codes.RUN, bytes(8)))
    forged = msgpack.packb([msgpack.ExtType(codes.NAMED, b""), *part])
    with pytest.raises(DecodeError):
        there(encoded, encoded.skeleton[: -len(run)] + forged)


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "another dtype": lambda: torch.zeros(3, dtype=torch.int32),
    "another shape": lambda: torch.zeros(4),
    "more axes": lambda: torch.zeros(3, 1),
    "other strides": lambda: torch.zeros(6)[::2],
    "requires grad": lambda: torch.zeros(3, requires_grad=True),
    "a history": lambda: torch.zeros(3, requires_grad=True) * 2,
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "of no memory": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse()[0],
    "with an attribute": lambda: _with_attribute(),
    "an inference tensor": lambda: _inference_tensor(),
    "part of a longer one": lambda: torch.arange(9.0)[3:6],
}


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("place", [0, 20, 39])
def test_one_that_is_not_like_the_others_is_seen(name: str, place: int) -> None:
    for _ in range(3):
        encode(many())
    assert alike.known(many()) is not None
    obj = many()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obj[place] = OTHERS[name]()
        received = there(encode(obj))
        assert_same(obj, received)
    if name == "with an attribute":
        assert received[place].note == "kept"


@pytest.mark.parametrize("nbytes", [0, 8])
def test_memory_that_was_taken_away_is_seen(nbytes: int) -> None:
    for _ in range(3):
        encode(many())
    obj = many()
    obj[7].untyped_storage().resize_(nbytes)
    with pytest.raises(EncodeError, match="no memory behind it") as caught:
        encode(obj)
    assert caught.value.path == "obj[7]"


def test_gradients_are_forbidden_of_those_too() -> None:
    obj = [torch.ones(3, requires_grad=True) for _ in range(40)]
    for _ in range(3):
        encode(obj)
    with pytest.raises(EncodeError, match=r"obj\[\d+\]"):
        encode(obj, forbid_grad=True)


def test_what_torch_compares_is_what_is_needed() -> None:
    """It is no public part of torch: if this fails, many tensors take longer, and arrive all the same."""
    assert alike._tells_apart()


def test_without_it_all_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "_tells_apart", lambda: False)
    monkeypatch.setattr(alike, "_patterns", type(alike._patterns)(32))
    for _ in range(3):
        assert_same(many(41), there(encode(many(41))))
    assert alike.known(many(41)) is None
