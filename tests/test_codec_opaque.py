"""What has to be pickled: classes by reference, identity, memory out of band, and clear errors."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from objcomm.codec import encode, registry
from objcomm.errors import DecodeError, EncodeError, UsageError
from tests.loopback import arrive, loopback
from tests.same import assert_same
from tests.values import Config, MyList, Pair, Plain, WithSlots, function

ROOT = Path(__file__).parent.parent


def test_one_object_in_several_leaves_stays_one_object() -> None:
    inner = Plain(x=1)
    received = loopback([inner, {"a": Plain(inner=inner)}, (MyList([inner]),), Config("c", [inner])])
    assert received[1]["a"].inner is received[0]
    assert received[2][0][0] is received[0]
    assert received[3].layers[0] is received[0]


def test_tensors_and_arrays_inside_keep_their_identity_and_are_never_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Any:
        raise AssertionError("pickled")

    t, a = torch.arange(6.0), np.arange(3)
    sent = [t, a, Plain(t=t, view=t[2:4], a=a, parameter=torch.nn.Parameter(torch.ones(2)), more=[{"t": t}])]
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__reduce_ex__", refuse)
        encoded = encode(sent)
        assert encoded.opaque
        received = arrive(encoded)
    assert received[2].t is received[0]
    assert received[2].more[0]["t"] is received[0]
    assert received[2].a is received[1]
    assert_same(sent, received)


class WithBuffer:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return WithBuffer, (pickle.PickleBuffer(self.data),)


def test_buffers_of_a_pickle_travel_out_of_band() -> None:
    data = bytearray(b"x" * 2_000_000)
    encoded = encode(WithBuffer(data))
    assert len(encoded.skeleton) < 500
    assert [segment.numel() for segment in encoded.segments] == [2_000_000]
    assert bytes(arrive(encoded).data) == data


@dataclasses.dataclass
class Custom:
    """A dataclass that says itself how it is pickled: that counts, not its fields."""

    value: int
    note: str = "local"

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.note = "restored"


def test_a_dataclass_that_pickles_itself_is_asked() -> None:
    encoded = encode(Custom(5))
    assert encoded.opaque
    assert arrive(encoded) == Custom(5, "restored")


def test_lambdas_and_local_things_travel_by_value() -> None:
    base = 10
    t = torch.ones(2)

    class Local:
        factor = 3

        def __init__(self, value: int) -> None:
            self.value = value

        def scaled(self) -> int:
            return self.value * self.factor

    received = loopback({"f": lambda x: x + base, "local": Local(4), "t": lambda: t, "same": t})
    assert received["f"](5) == 15
    assert received["local"].scaled() == 12
    assert received["t"]() is received["same"]


def test_what_a_module_holds_under_its_name_travels_by_reference() -> None:
    received = loopback([function, Plain, Plain(f=function), functools.partial(function, 1), torch.relu, len])
    assert received[0] is function
    assert received[1] is Plain
    assert received[2].f is function
    assert type(received[2]) is Plain
    assert received[3].func is function
    assert received[4] is torch.relu
    assert received[5] is len


MAIN_MODULE = """
    import multiprocessing
    from dataclasses import dataclass
    from enum import Enum

    import torch

    from objcomm.codec import encode, parse

    @dataclass
    class Point:
        x: int

    class Kind(Enum):
        A = 1

    class Thing:
        def __init__(self, x):
            self.x = x

    def double(x):
        return 2 * x

    def send(queue):
        encoded = encode([Point(1), Kind.A, Thing(2), double, Thing])
        inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
        encoded.write_inline(inline)
        queue.put((encoded.skeleton, inline.tolist()))

    def receive(queue, done):
        skeleton, inline = queue.get(timeout=60)
        inline = torch.tensor(inline, dtype=torch.uint8)
        received = parse(skeleton, inline_bytes=inline.numel(), segments=[], max_bytes=1 << 20).build(inline, [])
        assert isinstance(received[0], Point) and received[1] is Kind.A and isinstance(received[2], Thing)
        assert received[3] is double and received[4] is Thing and received[2].x == 2
        done.put("fine")

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue, done = context.Queue(), context.Queue()
        spawned = context.Process(target=send, args=(queue,))
        spawned.start()
        receive(queue, done)
        spawned.join(60)
        send(queue)
        spawned = context.Process(target=receive, args=(queue, done))
        spawned.start()
        assert [done.get(timeout=60), done.get(timeout=60)] == ["fine", "fine"]
        spawned.join(60)
"""


def test_a_class_of_the_main_module_is_the_receivers_own(tmp_path: Path) -> None:
    """Spawned processes have the main module under another name; it is the same to both."""
    script = tmp_path / "main_module.py"
    script.write_text(textwrap.dedent(MAIN_MODULE))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_module_registered_for_pickling_by_value_is_pickled_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_here")
    exec("class Thing:\n    answer = 42\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        encoded = encode([module.Thing()])
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "only_here")
    assert arrive(encoded)[0].answer == 42


def _module_with(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(textwrap.dedent(source), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("source", "make"),
    [
        ("class Thing:\n    pass", lambda module: module.Thing()),
        ("def Thing(): pass", lambda module: module.Thing),
        ("import dataclasses\n@dataclasses.dataclass\nclass Thing:\n    x: int", lambda module: module.Thing(1)),
        ("import enum\nclass Thing(enum.Enum):\n    A = 1", lambda module: module.Thing.A),
        ("import typing\nclass Thing(typing.NamedTuple):\n    x: int", lambda module: module.Thing(1)),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_class_that_the_receiver_lacks_is_named(
    source: str, make: Callable[[Any], Any], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module_with("vanishing_module", source, monkeypatch)
    encoded = encode({"a": [1, make(module)]})
    if whole:
        monkeypatch.delitem(sys.modules, "vanishing_module")
    else:
        monkeypatch.delattr(module, "Thing")
    with pytest.raises(DecodeError, match=r"vanishing_module\.Thing") as caught:
        arrive(encoded)
    assert caught.value.path == "obj['a'][1]"


class FailsToRestore:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _fail, (self.error,)


def _fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("error", [ValueError("on purpose"), MemoryError(), RecursionError(), KeyError("k")])
def test_what_fails_to_be_restored_is_named_with_its_path(error: Exception) -> None:
    encoded = encode([Plain(a=1), {"b": Pair(1, FailsToRestore(error))}])
    with pytest.raises(DecodeError, match=type(error).__name__) as caught:
        arrive(encoded)
    assert caught.value.path == "obj[1]['b'].right"


def test_a_key_that_cannot_be_hashed_any_more_is_named() -> None:
    class Key:
        hashable = True

        def __hash__(self) -> int:
            if not self.hashable:
                raise TypeError("unhashable by now")
            return 1

    key = Key()
    sent = {"a": [{key: 1}]}
    key.hashable = False
    with pytest.raises(DecodeError, match="unhashable by now") as caught:
        loopback(sent)
    assert caught.value.path == "obj['a'][0]"


def test_the_smallest_part_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def captures() -> Any:
        return lock

    slots = WithSlots({"k": (1, lock)})
    function_with_default = lambda x=lock: x  # noqa: E731
    for make, path in (
        (lambda: Plain(a=[1, {"b": Plain(lock=lock)}]), "obj[0].a[1]['b'].lock"),
        (lambda: slots, "obj[0].a['k'][1]"),
        (lambda: captures, "obj[0].__closure__[0].cell_contents"),
        (lambda: function_with_default, "obj[0].__defaults__[0]"),
        (lambda: functools.partial(str, lock), "obj[0].args[0]"),
        (lambda: Plain(lock=lock).method, "obj[0].__self__.lock"),
        (lambda: MyList([1, lock]), "obj[0][1]"),
    ):
        with pytest.raises(EncodeError, match="lock") as caught:
            encode([make()])
        assert caught.value.path == path


def test_an_attribute_that_is_not_pickled_is_not_blamed() -> None:
    class Careful:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.bad = [threading.Lock()]

        def __getstate__(self) -> dict[str, Any]:
            return {"bad": self.bad}

    with pytest.raises(EncodeError) as caught:
        encode({"c": Careful()})
    assert caught.value.path == "obj['c'].bad[0]"


def test_deep_objects_are_an_error_and_no_crash() -> None:
    value: Any = None
    for _ in range(100_000):
        value = Plain(inner=value)
    with pytest.raises(EncodeError, match="recursion"):
        encode(value)
    while value is not None:  # the interpreter's own deallocation is recursive in some versions
        value = value.__dict__.pop("inner")


# -- composites --------------------------------------------------------------------------------------------------------


class Wrapped:
    def __init__(self, name: str, *parts: Any) -> None:
        self.name, self.parts = name, parts


@pytest.fixture
def wrapped() -> Any:
    registry.register(
        "test.Wrapped",
        lambda obj: type(obj) is Wrapped,
        lambda obj: [obj.name, *obj.parts],
        lambda parts: Wrapped(*parts),
        base=Wrapped,
    )
    yield
    registry.unregister("test.Wrapped")


@pytest.mark.usefixtures("wrapped")
def test_a_composite_keeps_its_identity_wherever_it_is() -> None:
    inner = Wrapped("inner", torch.ones(3))
    outer = Wrapped("outer", inner, [inner])
    encoded = encode([outer, inner, {"a": (inner,)}])
    assert not encoded.opaque
    received = arrive(encoded)
    assert received[0].parts[0] is received[1] is received[2]["a"][0] is received[0].parts[1][0]
    received = loopback([Plain(inner=inner, t=inner.parts[0]), inner, outer])
    assert received[0].inner is received[1] is received[2].parts[0]
    assert received[0].t is received[1].parts[0]


@pytest.mark.usefixtures("wrapped")
def test_a_composite_may_hold_what_has_to_be_pickled() -> None:
    shared = Plain(x=1)
    inner = Wrapped("inner", torch.ones(3), shared)
    outer = Wrapped("outer", inner, torch.zeros(2))
    received = loopback([outer, inner, shared, Plain(inner=inner, outer=outer)])
    assert received[0].parts[0] is received[1] is received[3].inner
    assert received[0] is received[3].outer
    assert received[1].parts[1] is received[2]
    received = loopback([Plain(only=Wrapped("w", Plain(x=2), torch.ones(1)))])
    assert received[0].only.parts[0].x == 2


@pytest.mark.usefixtures("wrapped")
def test_a_composite_that_holds_itself_is_an_error() -> None:
    ring = Wrapped("ring")
    ring.parts = (ring,)
    with pytest.raises(EncodeError, match="contains itself"):
        encode([ring])


@pytest.mark.usefixtures("wrapped")
def test_a_composite_whose_parts_msgpack_would_mistake() -> None:
    received = loopback([Wrapped("w", bytearray(b"x"), {"k": [bytearray(b"y")]}, b"z" * 600_000)])
    assert received[0].parts == (bytearray(b"x"), {"k": [bytearray(b"y")]}, b"z" * 600_000)


def test_errors_of_a_composite_have_a_path(wrapped: Any) -> None:
    with pytest.raises(EncodeError, match="lock") as caught:
        encode({"w": [Wrapped("w", {"deep": threading.Lock()})]})
    assert caught.value.path == "obj['w'][0].parts[0]['deep']"
    encoded = encode({"w": [1, Wrapped("w", 1)]})
    registry.unregister("test.Wrapped")
    with pytest.raises(DecodeError, match=r"test\.Wrapped") as unknown:
        arrive(encoded)
    assert unknown.value.path == "obj['w'][1]"
    with pytest.raises(UsageError):
        registry.register("test.Twice", bool, list, list)
        registry.register("test.Twice", bool, list, tuple)
    registry.unregister("test.Twice")


def test_a_failing_rebuild_of_a_composite_has_a_path() -> None:
    registry.register(
        "test.Fails", lambda obj: type(obj) is Wrapped, lambda obj: [1], lambda parts: 1 // 0, base=Wrapped
    )
    try:
        with pytest.raises(DecodeError, match="ZeroDivisionError") as caught:
            loopback({"a": (1, Wrapped("w"))})
        assert caught.value.path == "obj['a'][1]"
    finally:
        registry.unregister("test.Fails")
