"""plain_pickle: pickled as Python's own pickle does it, with tensors still out of the stream."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from objcomm.codec import encode
from objcomm.codec.plain import plain_pickle
from objcomm.errors import EncodeError
from tests.loopback import arrive
from tests.same import assert_same
from tests.values import SAFE, VALUES, Config, Frozen, Plain

REFUSED = {"lambda", "local class", "defaultdict of a function"}


@pytest.mark.parametrize(("name", "make"), VALUES, ids=[name for name, _ in VALUES])
def test_every_value_that_pickle_takes(name: str, make: Any) -> None:
    torch.manual_seed(5)
    value = make()
    with plain_pickle():
        if name in REFUSED:
            with pytest.raises(EncodeError) as caught:
                encode(value)
            assert isinstance(caught.value.__cause__, (AttributeError, pickle.PicklingError))
            return
        encoded = encode(value)
    assert_same(value, arrive(encoded))


def test_dataclasses_are_pickled_and_their_tensors_are_not() -> None:
    big, small = torch.arange(200_000.0), torch.ones(3)
    value = [Config("c", [big, Frozen(small)], {"again": small})]
    for _ in range(2):  # what is kept of one message for the next knows the difference
        assert encode(value).opaque is False
        with plain_pickle():
            encoded = encode(value)
        assert encoded.opaque is True
        assert [segment.numel() for segment in encoded.segments] == [big.numel() * 4]
        assert encoded.segments[0].data_ptr() == big.data_ptr()
        assert_same(value, arrive(encoded))


def test_an_instance_that_occurs_twice_is_one_and_a_cycle_closes() -> None:
    one, other = Config("one", []), Plain(a=1)
    one.extra = [one, other]
    with plain_pickle():
        got: Any = arrive(encode([one, {"again": one}, other]))
    assert got[0] is got[1]["again"] is got[0].extra[0]
    assert got[2] is got[0].extra[1]


def test_restricted_trust_takes_dataclasses_apart_as_ever() -> None:
    value: Any = Config("c", [torch.ones(3)])
    with plain_pickle():
        encoded = encode(value, trust="restricted")
    assert encoded.opaque is False
    assert_same(value, arrive(encoded, trust="restricted"))
    for _, make in SAFE[::10]:
        torch.manual_seed(5)
        value = make()
        with plain_pickle():
            assert_same(value, arrive(encode(value, trust="restricted"), trust="restricted"))
