"""What is refused because a hostile rank could make use of it, and that honest objects of the same kind arrive."""

from __future__ import annotations

import dataclasses
import os
import random
import time
import zoneinfo
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch

from attacks.common import MEMORY, leaf, mark, message, receive, tensor
from attacks.work import colliding_pairs
from objcomm.codec import codes, encode, parse
from objcomm.codec.keys import Keys
from objcomm.config import Trust
from objcomm.errors import DecodeError, EncodeError, LimitError, TrustError
from tests.loopback import arrive, loopback
from tests.same import assert_same
from tests.values import Access, Frozen, FrozenSlotted, Mode, Pair

TRUSTS: list[Trust] = ["cluster", "restricted"]

# -- keys --------------------------------------------------------------------------------------------------------------


def _keyed() -> dict[str, Callable[[], Any]]:
    rng = random.Random(5)
    return {
        "numbers in order": lambda: {index: index for index in range(50_000)},
        "numbers at random": lambda: {rng.getrandbits(64) - (1 << 63): None for _ in range(20_000)},
        "multiples of a power of two": lambda: {index << 40: 1 for index in range(20_000)},
        "long numbers": lambda: {(1 << 100) + index: 1 for index in range(5_000)},
        "floats": lambda: {index / 7: 1 for index in range(20_000)},
        "tuples": lambda: {(index, str(index)): 1 for index in range(5_000)},
        "tuples of tuples": lambda: {(index, (index, (None, 1.5))): 1 for index in range(2_000)},
        "a set of everything": lambda: {*range(200), *"abc", None, 1.5, Decimal("7.5"), (1, Frozen(2)), frozenset([3])},
        "a frozenset": lambda: frozenset(range(1000)),
        "an ordered dict": lambda: OrderedDict((index, -index) for index in range(1000)),
        "a defaultdict": lambda: defaultdict(list, {index: [index] for index in range(1000)}),
        "dataclasses": lambda: {FrozenSlotted((index, "a")): index for index in range(2_000)},
        "strings": lambda: {f"name {index}": {"x": index} for index in range(5_000)},
        "strings and numbers": lambda: [{"a": {index: {"b": 1}}} for index in range(2_000)],
        "lists of tensors, then numbers": lambda: [
            [torch.ones(2) for _ in range(40)],
            {f"layer {index}": torch.ones(2) for index in range(40)},
            {index: torch.ones(2) for index in range(40)},
            dict.fromkeys(range(200), "x" * 50),
        ],
        "namedtuples": lambda: {Pair(index, 0): 1 for index in range(1_000)},
        "flags": lambda: {Access.READ | Access.WRITE, Mode(8), Mode.A | Mode.B},
    }


@pytest.mark.parametrize("name", _keyed())
def test_honest_keys_arrive_in_restricted_trust(name: str) -> None:
    obj = _keyed()[name]()
    arrived = loopback(obj, trust="restricted")
    assert_same(obj, arrived)
    if isinstance(obj, dict):
        assert list(arrived) == list(obj)


def test_a_mark_and_a_map_that_hold_the_same_key_twice_keep_the_last() -> None:
    """As Python does: with keys that are told apart bit by bit too."""
    pairs = [item for index in range(300) for item in (index % 200, index)]
    expected = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert receive(message(mark(codes.DICT, *pairs), definitions=[[]]), "restricted") == expected
    assert list(Keys().pairs(list(zip(pairs[::2], pairs[1::2], strict=True)))) == list(expected)


def test_a_key_without_a_value_is_refused() -> None:
    for code in (codes.DICT, codes.ORDERED_DICT):
        with pytest.raises(DecodeError, match="a key without a value"):
            receive(message(mark(code, 1, 2, 3), definitions=[[]]), "restricted")
    with pytest.raises(DecodeError, match="a key without a value"):
        receive(message(mark(codes.DEFAULT_DICT, None, 1), definitions=[[]]), "restricted")


def test_colliding_keys_are_given_up_in_bounded_time_and_few_of_them_arrive() -> None:
    pairs = colliding_pairs(20_000)
    assert len({hash(pair) for pair in pairs}) == 1
    few = dict.fromkeys(pairs[:300])
    assert loopback(few, trust="restricted") == few
    keys = [item for pair in pairs for item in (mark(codes.TUPLE, *pair), None)]
    start = time.process_time()
    with pytest.raises(LimitError, match="take too long"):
        receive(message(mark(codes.DICT, *keys)), "restricted")
    assert time.process_time() - start < 10


def test_a_key_of_many_parts_is_refused_and_one_of_some_arrives() -> None:
    key = tuple(range(9_000))
    assert loopback({key: [1] * 5000}, trust="restricted") == {key: [1] * 5000}
    with pytest.raises(LimitError, match="10000 parts"):
        loopback({tuple(range(11_000)): 1}, trust="restricted")
    with pytest.raises(LimitError, match="a number of"):
        loopback({1 << 50_000, Decimal(5), "x" * 5000}, trust="restricted")


@dataclasses.dataclass(frozen=True)
class Shown:
    x: Any

    def __repr__(self) -> str:
        shown.append("repr")
        return "Shown"


shown: list[str] = []


@pytest.mark.parametrize("trust", TRUSTS)
def test_the_path_of_an_error_runs_no_repr(trust: Trust) -> None:
    encoded = encode({Shown(1): [{(1, "b", Shown(2)): Decimal(5)}]}, trust="restricted")
    with pytest.raises(DecodeError) as caught:
        arrive(encoded, trust=trust, skeleton=encoded.skeleton.replace(b"\x195", b"\x19x"))
    assert caught.value.path == "obj[<Shown>][0][(1, 'b', <Shown>)]"
    assert shown == []


# -- nesting -----------------------------------------------------------------------------------------------------------


def _nested(make: Callable[[Any], Any], levels: int) -> Any:
    obj: Any = 1
    for _ in range(levels):
        obj = make(obj)
    return obj


@pytest.mark.parametrize("trust", TRUSTS)
def test_deep_containers_arrive(trust: Trust) -> None:
    for make in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}, FrozenSlotted):
        obj = loopback(_nested(make, 5_000), trust=trust)
        for _ in range(5_000):
            obj = obj["a"] if isinstance(obj, dict) else obj.a if isinstance(obj, FrozenSlotted) else obj[0]
        assert obj == 1


@pytest.mark.parametrize("trust", TRUSTS)
def test_slices_and_the_like_arrive_up_to_a_depth_at_which_dropping_them_is_safe(trust: Trust) -> None:
    make: Callable[[Any], Any]
    for make in (lambda inner: deque([inner]), slice, lambda inner: defaultdict(None, {0: inner})):
        obj = _nested(make, 400)
        assert type(loopback(obj, trust=trust)) is type(obj)
        with pytest.raises(DecodeError, match="more than 500"):
            loopback(_nested(make, 900), trust=trust)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", TRUSTS)
def test_long_bytes_and_text_that_occur_often_arrive_once(trust: Trust) -> None:
    data = os.urandom(5000)
    first, second, third = loopback([data] * 3, trust=trust, threshold=100)
    assert first == data and first is second and second is third
    array = bytearray(data)
    one, other = loopback([array, array], trust=trust, threshold=100)
    assert one == other == array and one is not other


def test_copies_are_limited_by_max_bytes() -> None:
    array = bytearray(1000)
    encoded = encode([array] * 20, threshold=100)

    def build(max_bytes: int) -> Any:
        sizes = [(segment.numel(), False) for segment in encoded.segments]
        plan = parse(encoded.skeleton, inline_bytes=encoded.inline_bytes, segments=sizes, max_bytes=max_bytes)
        inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
        encoded.write_inline(inline)
        return plan.build(inline, [segment.clone() for segment in encoded.segments])

    assert build(20_000) == [array] * 20
    with pytest.raises(LimitError) as caught:
        build(19_999)
    assert caught.value.path == "obj[19]"


def test_many_small_tensors_are_no_bomb() -> None:
    tensors = [torch.full((4,), float(index)) for index in range(10_000)]
    encoded = encode(tensors)
    plan = parse(encoded.skeleton, inline_bytes=encoded.inline_bytes, segments=[], max_bytes=1 << 20)
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    arrived: Any = plan.build(inline, [])
    assert len(arrived) == 10_000 and arrived[7].tolist() == [7.0] * 4


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_attributes_in_front_of_what_every_tensor_has_are_refused_on_both_ends() -> None:
    for name in ("numel", "tolist", "untyped_storage", "backward"):
        bad = torch.ones(2)
        bad.__dict__[name] = 5
        with pytest.raises(EncodeError, match=name):
            encode([bad])
    good = torch.ones(2)
    good.__dict__["tensor_parallel"] = True
    assert loopback(good, trust="restricted").tensor_parallel is True
    state: Any = OrderedDict(a=1)
    state._metadata = {"version": 1}
    assert loopback(state, trust="restricted")._metadata == {"version": 1}
    state.items = 5
    with pytest.raises(EncodeError, match="items"):
        encode(state)


@pytest.mark.parametrize("trust", TRUSTS)
def test_rows_that_are_longer_than_a_jagged_tensor_says_are_refused(trust: Trust) -> None:
    """Kernels size their work by it."""
    values, offsets = torch.arange(6.0), torch.tensor([0, 2, 6])
    make: Any = torch.nested.nested_tensor_from_jagged
    assert loopback(make(values, offsets), trust=trust)[1].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert_same(make(values, offsets, None, None, 1, 4), loopback(make(values, offsets, None, None, 1, 4), trust=trust))
    with pytest.raises(DecodeError, match="shorter or longer"):
        loopback(make(values, offsets, None, None, 1, 3), trust=trust)


def test_a_conjugate_does_not_reach_what_else_looks_at_its_memory() -> None:
    """The sender says that one leaf is itself, and its own conjugate."""
    forms = [tensor(10, [1])]
    skeleton = message(
        [MEMORY[0], leaf(codes.COMPOSITE, 0)],
        memory=[forms, [0], [], []],
        names=["tensor.bits"],
        composites=[[MEMORY[0], True, False, False]],
    )
    arrived: Any = receive(skeleton, "restricted")
    plain, conjugate = arrived
    assert not plain.is_conj() and conjugate.is_conj()


# -- time zones --------------------------------------------------------------------------------------------------------


def test_time_zones_of_the_system_arrive() -> None:
    for trust in TRUSTS:
        assert loopback([zoneinfo.ZoneInfo("Europe/Berlin")], trust=trust)[0].key == "Europe/Berlin"
    for name in ("tzdata.x/Berlin", "Europe/../../passwd", "/etc/passwd", "Europe/Nowhere", ""):
        encoded = encode([zoneinfo.ZoneInfo("Europe/Berlin")])
        old = bytes([13, codes.ZONE]) + b"Europe/Berlin"
        assert old in encoded.skeleton
        forged = encoded.skeleton.replace(b"\xc7" + old, b"\xc7" + bytes([len(name), codes.ZONE]) + name.encode())
        with pytest.raises(TrustError, match="time zones"):
            arrive(encoded, trust="restricted", skeleton=forged)
