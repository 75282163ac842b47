"""What the codec keeps from one message for the next: it must never show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from objcomm.codec import Encoded, encode, parse
from objcomm.codec.kept import Kept
from objcomm.errors import DecodeError, EncodeError, LimitError


def _inline(encoded: Encoded) -> torch.Tensor:
    inline = torch.full((encoded.inline_bytes,), 0xAA, dtype=torch.uint8)
    encoded.write_inline(inline)
    return inline


def _arrive(encoded: Encoded, **other: Any) -> Any:
    segments = [(segment.numel(), False) for segment in encoded.segments]
    known: dict[str, Any] = {"inline_bytes": encoded.inline_bytes, "segments": segments, "max_bytes": 1 << 20}
    plan = parse(encoded.skeleton, **{**known, **other})
    return plan.build(_inline(encoded), [segment.clone() for segment in encoded.segments])


def _message(start: int) -> dict[str, Any]:
    return {"a": [torch.arange(start, start + 6).view(2, 3), start], "b": torch.ones(3, dtype=torch.bool)}


def test_messages_that_look_alike_are_encoded_alike_and_arrive_apart() -> None:
    encoded = [encode(_message(start)) for start in range(3)]
    arrived = [_arrive(each) for each in encoded]
    assert len({each.skeleton.replace(b"\x01", b"\x00").replace(b"\x02", b"\x00") for each in encoded}) == 1
    for start, each in enumerate(arrived):
        assert each["a"][0].tolist() == _message(start)["a"][0].tolist()
        assert each["a"][1] == start
    arrived[0]["a"][0].add_(100)
    arrived[0]["b"].resize_(1000)
    assert arrived[1]["a"][0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert arrived[1]["b"].tolist() == [True] * 3


def test_what_comes_with_a_known_table_is_still_checked() -> None:
    encoded = encode(_message(0))
    _arrive(encoded)
    with pytest.raises(DecodeError, match="inline area"):
        _arrive(encoded, inline_bytes=encoded.inline_bytes + 1)
    with pytest.raises(DecodeError, match="segments"):
        _arrive(encoded, segments=[(8, False)])
    with pytest.raises(LimitError, match="max_bytes"):
        _arrive(encoded, max_bytes=8)
    with pytest.raises(DecodeError, match="announced"):
        parse(encoded.skeleton, inline_bytes=encoded.inline_bytes, segments=[], max_bytes=1 << 20).build(
            torch.empty(encoded.inline_bytes - 1, dtype=torch.uint8), []
        )
    _arrive(encoded)


def test_the_threshold_decides_anew_for_every_message() -> None:
    obj = [torch.arange(1000), torch.arange(10)]
    for threshold, segments in ((1 << 19, 0), (4000, 1), (1 << 19, 0), (8, 2)):
        encoded = encode(obj, threshold=threshold)
        assert len(encoded.segments) == segments
        assert [each.tolist() for each in _arrive(encoded)] == [each.tolist() for each in obj]


def test_alike_but_for_shared_memory() -> None:
    apart = [torch.zeros(4), torch.zeros(4)]
    base = torch.zeros(6)
    for _ in range(2):
        one, other = _arrive(encode(apart))
        one.add_(1)
        assert other.tolist() == [0] * 4
        one, other = _arrive(encode([base[:4], base[2:]]))
        one.add_(1)
        assert other.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("value", [1 << 70, "\ud800", (1, 2), float("nan")])
def test_one_value_among_tensors_that_msgpack_has_no_room_for(value: Any) -> None:
    tensor = torch.ones(2)
    arrived = _arrive(encode({"x": [tensor, value], "y": tensor}))
    assert repr(arrived["x"][1]) == repr(value)
    assert arrived["x"][0] is arrived["y"]


def test_a_tensor_whose_memory_is_gone_is_named_each_time() -> None:
    kept, freed = torch.ones(4), torch.ones(4)
    _arrive(encode({"a": kept, "b": [freed]}))
    freed.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(EncodeError, match="no memory behind it") as caught:
            encode({"a": kept, "b": [freed]})
        assert caught.value.path == "obj['b'][0]"


def test_the_receiver_s_inference_mode_does_not_reach_small_tensors() -> None:
    encoded = encode(_message(0))
    with torch.inference_mode():
        arrived = _arrive(encoded)
    assert not arrived["b"].is_inference()


def test_the_same_few_tensors_again_and_again() -> None:
    row = [torch.ones(1)] * 1000
    encoded = encode([row] * 1100)
    assert len(encoded.skeleton) < 1 << 20
    arrived = _arrive(encoded)
    assert arrived[0][0] is arrived[1099][999]


def test_what_is_kept_is_bounded() -> None:
    kept: Kept[int, int] = Kept(3)
    for key in range(10):
        kept.keep(key, -key)
        assert kept[key] == -key
        assert len(kept) <= 3
