"""Values through the codec and back: exact types and values, and what happens to malformed skeletons."""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import random
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objcomm.codec import Encoded, deep, encode
from objcomm.errors import DecodeError, EncodeError, LimitError, TrustError
from tests.generated import Generator
from tests.loopback import arrive, loopback, plan_of
from tests.same import assert_same
from tests.values import PLAIN, TENSORS, VALUES, Config, Frozen, Pair, Plain, quietly

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("name", "make"), VALUES, ids=[name for name, _ in VALUES])
def test_value_arrives_as_it_was_sent(name: str, make: Callable[[], object]) -> None:
    obj = make()
    assert_same(obj, quietly(lambda: loopback(obj)))


@pytest.mark.parametrize(("name", "make"), VALUES, ids=[name for name, _ in VALUES])
def test_value_arrives_when_every_buffer_is_a_segment(name: str, make: Callable[[], object]) -> None:
    obj = make()
    assert_same(obj, quietly(lambda: loopback(obj, threshold=1)))


@pytest.mark.parametrize("block", range(20))
def test_generated_objects_arrive_as_they_were_sent(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        obj = Generator(seed).make()
        try:
            assert_same(obj, loopback(obj))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_encoding_leaves_the_object_alone() -> None:
    for name, make in VALUES:
        obj, untouched = make(), make()
        encode(obj)
        if name not in ("uuids", "stage output", "channels last", "qr", "module", "state dict"):  # random ones
            assert_same(obj, untouched)


def test_dict_keeps_its_order_and_the_types_of_its_keys() -> None:
    sent = {2: "b", "1": "a", 1: "c", b"1": "d", (1,): "e", 1.5: "f", None: "g", False: "h"}
    received = loopback(sent)
    assert list(received) == list(sent)
    assert list(map(type, received)) == list(map(type, sent))


def test_long_text_travels_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that msgpack has no room for; the limit is lowered, since the real one is 4 GiB."""
    monkeypatch.setattr(deep, "_LONG_TEXT", 100)
    text = "\ud800\u20ac" * 100
    sent = {"a": text, "b": [text, (text, "short")], "c": bytearray(b"x")}
    encoded = encode(sent)
    assert len(encoded.skeleton) < 200
    assert_same(sent, arrive(encoded))


def test_msgpacks_own_types_are_values_like_any_other() -> None:
    sent = [msgpack.ExtType(1, b"\0"), {"t": msgpack.Timestamp(5)}, (msgpack.ExtType(0, b""),)]
    received = loopback(sent)
    assert received == sent
    assert type(received[0]) is msgpack.ExtType
    assert type(received[1]["t"]) is msgpack.Timestamp


def test_long_nesting_costs_no_recursion() -> None:
    for make in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}, Frozen):
        value: Any = None
        for _ in range(20_000):
            value = make(value)
        received, depth = loopback(value, trust="restricted"), 0
        while received is not None:
            assert type(received) is type(value)
            received = (
                received["k"]
                if isinstance(received, dict)
                else getattr(received, "key", None) or (received[0] if isinstance(received, (list, tuple)) else None)
            )
            depth += 1
        assert depth == 20_000


@pytest.mark.parametrize("make", [lambda x: [x, x], lambda x: (x, x), lambda x: {1: x, 2: x}, lambda x: Pair(x, [x])])
def test_repeated_parts_do_not_explode(make: Callable[[Any], Any]) -> None:
    value: Any = [1, 2, 3]
    for _ in range(200):
        value = make(value)
    encoded = encode(value)
    assert len(encoded.skeleton) < 100_000
    arrive(encoded)


def test_a_list_of_one_container_many_times_is_a_list_of_equal_ones() -> None:
    inner = (1, [2])
    received = loopback([inner] * 200_000)
    assert len(received) == 200_000
    assert received[0] == received[-1] == inner


@pytest.mark.parametrize("trust", ["cluster", "restricted"])
def test_a_cycle_arrives_as_a_cycle_or_is_refused(trust: Any) -> None:
    ring: list[Any] = [1, {"a": 2}]
    ring[1]["ring"] = ring
    sent = {"ring": ring, "beside": (1, bytearray(b"x"))}
    if trust == "restricted":
        with pytest.raises(TrustError, match=r"contains itself.*obj\['ring'\]"):
            encode(sent, trust=trust)
        return
    received = loopback(sent)
    assert received["ring"][1]["ring"] is received["ring"]
    assert_same(received, sent)


@dataclasses.dataclass
class Node:
    value: Any
    other: Any = None


def test_instances_of_dataclasses_keep_their_identity() -> None:
    one = Node([1])
    around = (2, [one])
    for trust in ("cluster", "restricted"):
        received = loopback([one, {"a": one, (1,): Node(one, one)}, around, around, Pair(one, around)], trust=trust)
        first = received[0]
        assert received[1]["a"] is first
        assert received[1][1,].value is received[1][1,].other is first
        assert received[2][1][0] is received[3][1][0] is received[4].left is received[4].right[1][0] is first
        assert first == one
    distinct = loopback([Node(1), Node(1)])
    assert distinct[0] is not distinct[1]


def test_instances_of_dataclasses_are_the_same_inside_and_outside_of_a_pickle() -> None:
    inner = Node(torch.ones(2))
    outer = Node(inner)
    received = loopback([outer, Plain(inner=inner), {"inner": inner}, inner.value, Plain(outer=outer)])
    assert received[0].value is received[1].inner is received[2]["inner"]
    assert received[0] is received[4].outer
    assert received[3] is received[1].inner.value


def test_parts_around_a_cycle_are_not_pickled() -> None:
    cyclic = Config("loop", [])
    cyclic.layers.append(cyclic)
    received = loopback([cyclic, {"t": torch.ones(2)}, cyclic])
    assert received[0] is received[2]
    assert received[0].layers[0] is received[0]


# -- hostile objects ---------------------------------------------------------------------------------------------------


class _Raises:
    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "names"):
            raise RuntimeError(f"no {name}")
        return object.__getattribute__(self, name)

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("no class")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class _Unhashable(type):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no equality of classes")


class _OfUnhashableClass(metaclass=_Unhashable):
    pass


class _Reduces:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


UNSENDABLE: dict[str, Callable[[], Any]] = {
    "_OfUnhashableClass": _OfUnhashableClass,
    "on purpose": lambda: _Reduces(RuntimeError("on purpose")),
    "excessively deep": lambda: _Reduces(RecursionError()),
    "MemoryError": lambda: _Reduces(MemoryError()),
    "lock": threading.Lock,
    "memoryview": lambda: memoryview(b"x"),
    "generator": lambda: (item for item in [1]),
    "_Raises": lambda: _Raises("__reduce_ex__", "__reduce__"),
    "frame": sys._getframe,
    "TextIOWrapper": lambda: io.TextIOWrapper(io.BytesIO()),
}


@pytest.mark.parametrize("text", UNSENDABLE)
def test_what_cannot_be_sent_is_named_with_its_path(text: str) -> None:
    bad = UNSENDABLE[text]()
    with pytest.raises(EncodeError, match=text) as caught:
        encode({"cfg": [1, Pair(2, {"deep": bad})]})
    assert caught.value.path == "obj['cfg'][1].right['deep']"
    with pytest.raises(EncodeError, match=text) as caught:
        encode({"cfg": Plain(layers=[0, Config("c", [bad])])})
    assert caught.value.path == "obj['cfg'].layers[1].layers[0]"


class Liar:
    """Claims to be an int. pickle refuses it; nothing may take it for the int that it claims to be."""

    @property
    def __class__(self) -> Any:
        return int

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


def test_an_object_may_lie_about_its_class() -> None:
    with pytest.raises(EncodeError, match="Liar") as caught:
        encode([1, Liar()])
    assert caught.value.path == "obj[1]"
    assert type(loopback({"a": Frozen(int)})["a"]) is Frozen


def test_interrupts_are_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        encode([_Reduces(KeyboardInterrupt())])


class _ReEnters:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        inner = encode([self.value, (1, 2), torch.ones(3)])
        assert_same(arrive(inner), [self.value, (1, 2), torch.ones(3)])
        return _ReEnters, (self.value,)


def test_encoding_may_happen_inside_of_encoding() -> None:
    received = loopback([(1,), _ReEnters({"a": (3,)}), torch.zeros(2)])
    assert received[1].value == {"a": (3,)}


def test_many_threads_encode_at_the_same_time() -> None:
    failures: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 15):
                obj = Generator(seed).make()
                assert_same(obj, loopback(obj))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(5000 + 100 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert gc.isenabled()


def test_the_collector_is_as_before() -> None:
    encoded = encode([(1,), Plain(a=1)])
    arrive(encoded)
    assert gc.isenabled()
    with pytest.raises(DecodeError):
        arrive(encoded, skeleton=encoded.skeleton[:-1] + b"\xc1")
    assert gc.isenabled()
    gc.disable()
    try:
        arrive(encoded)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_numpy_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch\n"
        "from tests.loopback import loopback\n"
        "sent = {'a': (1, [torch.ones(2)], {3: torch.float16}), 'b': b'x' * 10**6}\n"
        "received = loopback(sent)\n"
        "assert received['a'][1][0].tolist() == [1, 1] and received['b'] == sent['b']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- malformed skeletons -----------------------------------------------------------------------------------------------

ALLOWED = (DecodeError, TrustError, LimitError)


def _try(encoded: Any, skeleton: bytes, trust: Any = "cluster") -> None:
    """Whatever the skeleton is: an object, or one of the allowed errors."""
    try:
        quietly(lambda: arrive(encoded, skeleton=skeleton, trust=trust))
    except ALLOWED:
        pass


def _array32(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


def _tables(tables: Any, composites: bytes, tree: bytes) -> bytes:
    packed: bytes = msgpack.packb(tables)
    return struct.pack("<BII", 1, len(packed), len(composites)) + packed + composites + tree


EMPTY: list[Any] = [None, [], [], None, 0]

MALFORMED = {
    "nothing": b"",
    "unknown format": b"\x07\xc0",
    "no tree": b"\0",
    "array of 2^32": b"\0" + _array32(2**32 - 1),
    "map of 2^32": b"\0\xdf\xff\xff\xff\xff",
    "string of 2^32": b"\0\xdb\xff\xff\xff\xff",
    "bytes of 2^32": b"\0\xc6\xff\xff\xff\xff",
    "ext of 2^32": b"\0\xc9\xff\xff\xff\xff\x10",
    "nested large arrays": b"\0" + _array32(900_000) * 900 + b"\xc0" * 900_000,
    "deep": b"\0" + b"\x91" * 100_000 + b"\xc0",
    "trailing": b"\0\xc0\xc0",
    "reserved": b"\0\xc1",
    "ext in a plain tree": b"\0\xd4\x40\0",
    "list as a key": b"\0\x81\x90\xc0",
    "bad utf-8": b"\0\xa1\xff",
    "short header": b"\1\0\0",
    "lengths beyond the end": struct.pack("<BII", 1, 2**32 - 1, 2**32 - 1) + b"\xc0",
    "no tables": _tables(None, b"", b"\xc0"),
    "short tables": _tables([None, []], b"", b"\xc0"),
    "names that are numbers": _tables([None, [1], [], None, 0], b"", b"\xc0"),
    "classes that are numbers": _tables([None, [], [1], None, 0], b"", b"\xc0"),
    "empty class": _tables([None, [], [[]], None, 0], b"", b"\xc0"),
    "unknown kind": _tables([None, [], [["what", "builtins", "int", []]], None, 0], b"", b"\xc0"),
    "class of no kind": _tables([None, [], [["dataclass", "builtins", "int", [], None]], None, 0], b"", b"\xc0"),
    "module of numbers": _tables([None, [], [["dataclass", 5, "int", [], None]], None, 0], b"", b"\xc0"),
    "fields of numbers": _tables([None, [], [["dataclass", "tests.values", "Box", [1], None]], None, 0], b"", b"\xc0"),
    "negative definitions": _tables([None, [], [], None, -1], b"", b"\xc0"),
    "definitions that are not there": _tables([None, [], [], None, 3], b"", b"\xc0"),
    "stream of the wrong shape": _tables([None, [], [], [0], 0], b"", b"\xc0"),
    "stream that is not there": _tables([None, [], [], [5, 1, []], 0], b"", b"\xc0"),
    "unknown composite": _tables([None, ["no such"], [], None, 0], b"\x90", b"\xc0"),
    "mark that is no first item": _tables(EMPTY, b"", b"\x92\xc0\xc7\x00\x40"),
    "mark alone": _tables(EMPTY, b"", b"\xc7\x00\x40"),
    "mark as a key": _tables(EMPTY, b"", b"\x81\xc7\x00\x40\xc0"),
    "unknown code": _tables(EMPTY, b"", b"\xc7\x00\x7f"),
    "memory that is not there": _tables(EMPTY, b"", b"\xc7\x01\x00\x05"),
    "composite that is not there": _tables(EMPTY, b"", b"\xc7\x01\x01\x05"),
    "opaque leaf that is not there": _tables(EMPTY, b"", b"\xc7\x01\x02\x05"),
    "shared part that is not there": _tables(EMPTY, b"", b"\xc7\x01\x03\x05"),
    "member that is not there": _tables(EMPTY, b"", b"\xc7\x01\x04\x05"),
    "class that is not there": _tables(EMPTY, b"", b"\x91\xc7\x01\x4f\x05"),
    "huge index": _tables(EMPTY, b"", b"\xc7\x20\x00" + b"\xff" * 32),
    "short complex": _tables(EMPTY, b"", b"\xc7\x03\x11abc"),
    "unknown torch name": _tables(EMPTY, b"", b"\xc7\x0b\x15torch.load\0"),
    "odd device": _tables(EMPTY, b"", b"\xc7\x04\x16abcd"),
    "odd scalar": _tables(EMPTY, b"", b"\xc7\x04\x17|O\0x"),
    "odd dtype": _tables(EMPTY, b"", b"\xc7\x03\x18O,O"),
    "odd decimal": _tables(EMPTY, b"", b"\xc7\x01\x19x"),
    "short uuid": _tables(EMPTY, b"", b"\xc7\x03\x1aabc"),
    "odd path": _tables(EMPTY, b"", b"\xc7\x03\x1bA\0b"),
    "odd date": _tables(EMPTY, b"", b"\xc7\x04\x1c\0\0\0\0"),
    "odd zone": _tables(EMPTY, b"", b"\xc7\x09\x1e../passwd"),
    "odd timestamp": _tables(EMPTY, b"", b"\xc7\x05\xff12345"),
    "set of lists": _tables(EMPTY, b"", b"\x92\xc7\x00\x41\x90"),
    "key without a value": _tables(EMPTY, b"", b"\x92\xc7\x00\x43\x01"),
    "range of strings": _tables(EMPTY, b"", b"\x94\xc7\x00\x47\xa1a\xa1b\xa1c"),
    "short deque": _tables(EMPTY, b"", b"\x91\xc7\x00\x46"),
    "deque too long": _tables(EMPTY, b"", b"\x94\xc7\x00\x46\x01\x01\x01"),
    "defaultdict of a number": _tables(EMPTY, b"", b"\x92\xc7\x00\x45\x05"),
    "size of strings": _tables(EMPTY, b"", b"\x92\xc7\x00\x49\xa1a"),
    "short datetime": _tables(EMPTY, b"", b"\x92\xc7\x00\x4a\x01"),
    "timezone of a number": _tables(EMPTY, b"", b"\x92\xc7\x00\x4c\x01"),
    "record of a number": _tables(EMPTY, b"", b"\x92\xc7\x00\x4d\x01"),
    "definition where none is due": _tables(EMPTY, b"\x91\x91\xc7\x00\x50", b"\xc0"),
}


@pytest.mark.parametrize("trust", ["cluster", "restricted"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_skeletons_are_refused_and_allocate_nothing(name: str, trust: Any) -> None:
    encoded = encode(1)
    tracemalloc.start()
    try:
        with pytest.raises((DecodeError, TrustError)):
            arrive(encoded, skeleton=MALFORMED[name], trust=trust)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(MALFORMED[name]) + 2**20


def test_memory_that_the_skeleton_does_not_use_is_refused() -> None:
    encoded = encode([1])
    encoded.inline_bytes = 64
    with pytest.raises(DecodeError, match="does not use"):
        plan_of(encoded)


_LARGE = {"deep list", "deep tuple", "wide", "strings", "long bytes", "long bytearray", "repeated container"}
_TARGETS = [(name, make) for name, make in [*PLAIN, *TENSORS] if name not in _LARGE]


@functools.cache
def _target(number: int) -> Encoded:
    return encode(_TARGETS[number][1]())


@settings(max_examples=1500, deadline=None, database=None)
@given(st.integers(0, len(_TARGETS) - 1), st.integers(), st.integers(1, 6), st.sampled_from(["cluster", "restricted"]))
def test_changed_skeletons_never_raise_anything_else(number: int, seed: int, changes: int, trust: Any) -> None:
    encoded, chance = _target(number), random.Random(seed)
    skeleton = bytearray(encoded.skeleton)
    for _ in range(changes):
        place = chance.randrange(len(skeleton) + 1)
        how = chance.randrange(5)
        if how == 0 and place < len(skeleton):
            skeleton[place] = chance.randrange(256)
        elif how == 1:
            skeleton[place:place] = bytes([chance.choice((0x90, 0xC7, 0xDD, 0xFF, 0, 0x41))])
        elif how == 2:
            del skeleton[place : place + chance.randrange(1, 4)]
        elif how == 3 and place < len(skeleton):
            skeleton[place] ^= 1 << chance.randrange(8)
        elif how == 4:
            skeleton[place:] = skeleton[place : place + chance.randrange(50)]
        if not skeleton:
            break
    _try(encoded, bytes(skeleton), trust)


@settings(max_examples=500, deadline=None, database=None)
@given(st.binary(max_size=200), st.sampled_from([b"\0", struct.pack("<BII", 1, 5, 0) + b"\x95\xc0\x90\x90\xc0\x00"]))
def test_random_bytes_never_raise_anything_else(data: bytes, prefix: bytes) -> None:
    encoded = encode(1)
    _try(encoded, data)
    _try(encoded, prefix + data)
    _try(encoded, prefix + data, "restricted")


def test_the_path_of_what_cannot_be_rebuilt_is_named() -> None:
    encoded = encode({"cfg": [0, Frozen([1, {(2, 3): 1j}])]})
    short = encoded.skeleton.replace(b"\xd8\x11", b"\xd8\x7e")
    assert short != encoded.skeleton
    with pytest.raises(DecodeError) as caught:
        arrive(encoded, skeleton=short)
    assert caught.value.path == "obj['cfg'][1].key[1][(2, 3)]"


# -- time --------------------------------------------------------------------------------------------------------------


def _best(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_plain_values_are_fast() -> None:
    """Against msgpack by itself, so that a slow machine does not matter."""
    wide = {f"k{i}": {"a": i, "b": [float(i), f"s{i}", None, True], "c": {"x": i, "y": "v"}} for i in range(1000)}
    encoded, packed = encode(wide), msgpack.packb(wide)
    floor = _best(lambda: msgpack.packb(wide), 20) + _best(lambda: msgpack.unpackb(packed), 20)
    ours = _best(lambda: encode(wide), 20) + _best(lambda: arrive(encoded), 20)
    assert ours < 3 * floor
