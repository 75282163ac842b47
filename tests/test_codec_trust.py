"""Restricted trust: nothing is unpickled, imported or executed, whatever the sender sends."""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import torch

from objcomm.codec import codes, encode, registry
from objcomm.errors import DecodeError, EncodeError, TrustError
from tests.generated import Generator
from tests.loopback import arrive, loopback
from tests.same import assert_same
from tests.values import PICKLED, SAFE, Color, Config, Frozen, Pair, Plain, quietly

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> Any:
    ran.clear()
    yield
    assert ran == []


@pytest.mark.parametrize(("name", "make"), SAFE, ids=[name for name, _ in SAFE])
def test_safe_value_arrives_as_it_was_sent(name: str, make: Callable[[], object]) -> None:
    obj = make()
    assert_same(obj, quietly(lambda: loopback(obj, trust="restricted")))


def test_generated_objects_arrive_as_they_were_sent() -> None:
    for seed in range(10_000, 10_300):
        obj = Generator(seed, pickled=False).make()
        assert_same(obj, loopback(obj, trust="restricted"))


@pytest.mark.parametrize(("name", "make"), PICKLED, ids=[name for name, _ in PICKLED])
def test_what_has_to_be_pickled_is_refused_on_both_ends(name: str, make: Callable[[], object]) -> None:
    obj = {"a": [1, make()]}
    with pytest.raises(TrustError) as caught:
        encode(obj, trust="restricted")
    assert caught.value.path is not None
    assert caught.value.path.startswith("obj['a'][1]")
    encoded = encode(obj)
    assert encoded.opaque
    with pytest.raises(TrustError) as caught:
        arrive(encoded, trust="restricted")
    assert caught.value.path is not None
    assert caught.value.path.startswith("obj['a'][1]")


def note(what: str) -> None:
    ran.append(what)


class RunsCode:
    def __reduce__(self) -> Any:
        return note, ("pickle",)


def test_a_pickle_that_runs_code_is_not_unpickled() -> None:
    encoded = encode([torch.ones(2), RunsCode()])
    with pytest.raises(TrustError, match="pickle"):
        arrive(encoded, trust="restricted")
    assert ran == []
    assert "pickle" not in ran
    arrive(encoded, trust="cluster")
    assert ran == ["pickle"]
    ran.clear()


def test_a_sender_cannot_hide_its_pickle() -> None:
    """The tables are the sender's; leaving the stream out of them only makes the leaves unresolvable."""
    encoded = encode([RunsCode()])
    _, tables_bytes, composites_bytes = struct.unpack_from("<BII", encoded.skeleton)
    tables = msgpack.unpackb(encoded.skeleton[9 : 9 + tables_bytes])
    rest = encoded.skeleton[9 + tables_bytes :]
    tables[3] = None
    packed = msgpack.packb(tables)
    with pytest.raises(DecodeError):
        arrive(
            encoded, trust="restricted", skeleton=struct.pack("<BII", 1, len(packed), composites_bytes) + packed + rest
        )


# -- classes -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Loud:
    """Everything that a class can run while its instance is made, compared, shown or dropped."""

    x: Any
    y: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Loud:
        ran.append("new")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        ran.append("post_init")

    def __setattr__(self, name: str, value: Any) -> None:
        ran.append("setattr")
        object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        ran.append("getattribute")
        return object.__getattribute__(self, name)

    def __init_subclass__(cls) -> None:
        ran.append("init_subclass")


@dataclasses.dataclass(slots=True)
class LoudSlots:
    x: Any

    def __post_init__(self) -> None:
        ran.append("post_init")

    def __setattr__(self, name: str, value: Any) -> None:
        ran.append("setattr")
        object.__setattr__(self, name, value)


class LoudTuple(Pair):
    def __new__(cls, *args: Any) -> LoudTuple:
        ran.append("new")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any) -> None:
        ran.append("init")


class LoudColor(enum.Enum):
    RED = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        ran.append("missing")
        return cls.RED


@pytest.mark.parametrize("make", [lambda: Loud(1, [2]), lambda: LoudSlots((1,)), lambda: LoudTuple(1, 2)])
@pytest.mark.parametrize("trust", ["cluster", "restricted"])
def test_instances_are_rebuilt_without_running_their_class(make: Callable[[], Any], trust: Any) -> None:
    obj = make()
    ran.clear()
    received = loopback([obj], trust=trust)[0]
    assert ran == []
    assert type(received) is type(obj)
    for name in ("left", "right") if isinstance(obj, tuple) else ("x",):
        assert object.__getattribute__(received, name) == object.__getattribute__(obj, name)
    ran.clear()


def test_members_are_looked_up_and_not_made() -> None:
    assert loopback([LoudColor.RED], trust="restricted") == [LoudColor.RED]
    encoded = encode([LoudColor.RED], trust="restricted")
    with pytest.raises(DecodeError, match="no member 'RUD'"):
        arrive(encoded, trust="restricted", skeleton=encoded.skeleton.replace(b"RED", b"RUD"))


def _message(entries: list[Any], tree: Any) -> Any:
    """A message as a hostile sender would write it."""
    encoded = encode(1)
    tables = msgpack.packb([None, [], entries, None, 0])
    encoded.skeleton = struct.pack("<BII", 1, len(tables), 0) + tables + msgpack.packb(tree)
    return encoded


def _instance(index: int, *values: Any) -> list[Any]:
    return [msgpack.ExtType(codes.INSTANCE, codes.number(index)), *values]


@dataclasses.dataclass
class Drops:
    """What an attacker looks for: code that runs when the instance is dropped."""

    path: str

    def __del__(self) -> None:
        ran.append("del")


@dataclasses.dataclass
class Restores:
    path: str

    def __setstate__(self, state: Any) -> None:
        ran.append("setstate")


class Ordinary:
    pass


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name not in ("__class__", "__module__", "__qualname__", "__dict__"):
            ran.append(f"meta {name}")
        return super().__getattribute__(name)

    def __hash__(cls) -> int:
        ran.append("meta hash")
        return 1


@dataclasses.dataclass
class OfMeta(metaclass=Meta):
    x: Any


ran.clear()


class CDerived(OrderedDict[Any, Any]):
    pass


dataclasses.dataclass(CDerived)


@pytest.mark.parametrize(
    ("module", "name", "fields"),
    [
        (__name__, "Drops", ["path"]),
        (__name__, "Restores", ["path"]),
        (__name__, "Ordinary", []),
        (__name__, "OfMeta", ["x"]),
        (__name__, "CDerived", []),
        ("subprocess", "Popen", ["args"]),
        ("builtins", "int", []),
        ("builtins", "object", []),
        ("torch", "Tensor", []),
        ("torch.nn.modules.linear", "Linear", ["in_features"]),
    ],
)
@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "structseq", "enum", "flag"])
def test_other_classes_are_refused(module: str, name: str, fields: list[str], kind: str) -> None:
    rest = ["RED"] if kind in ("enum", "flag") else [fields, None] if kind == "dataclass" else [fields]
    encoded = _message([[kind, module, name, *rest]], _instance(0, *("x" for _ in fields)))
    with pytest.raises(TrustError, match=name):
        arrive(encoded, trust="restricted")
    assert ran == []
    with pytest.raises(DecodeError, match=name):
        arrive(encoded)
    ran.clear()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("antigravity", "geohash"),
        ("this", "s"),
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "no_such"),
        ("collections", "abc.Mapping.get"),
        (__name__, "Config.__init__.__globals__"),
        (__name__, "sys.modules"),
        ("sys", "modules.os"),
        ("no.such.module", "X"),
        ("", ""),
    ],
)
def test_names_that_are_no_class_are_refused_and_nothing_is_imported(module: str, name: str) -> None:
    encoded = _message([["dataclass", module, name, [], None]], _instance(0))
    before = set(sys.modules)
    with pytest.raises((DecodeError, TrustError)):
        arrive(encoded, trust="restricted")
    assert set(sys.modules) == before


def test_cluster_trust_imports_the_module_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "to_be_imported.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    encoded = _message([["dataclass", "to_be_imported", "C", ["x"], None]], _instance(0, 5))
    with pytest.raises(DecodeError, match=r"to_be_imported\.C is not known here"):
        arrive(encoded, trust="restricted")
    assert arrive(encoded).x == 5
    assert arrive(encoded, trust="restricted").x == 5
    monkeypatch.delitem(sys.modules, "to_be_imported")


def test_a_module_that_imports_lazily_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lazy_module")
    module.__getattr__ = lambda name: ran.append(name)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    with pytest.raises(DecodeError, match="lazy_module"):
        arrive(_message([["dataclass", "lazy_module", "C", [], None]], _instance(0)), trust="restricted")


# -- fields ------------------------------------------------------------------------------------------------------------


def _replaced(obj: Any, old: bytes, new: bytes) -> Any:
    encoded = encode(obj)
    assert encoded.skeleton.count(old) >= 1
    encoded.skeleton = encoded.skeleton.replace(old, new)
    return encoded


@pytest.mark.parametrize("trust", ["cluster", "restricted"])
def test_fields_must_be_those_of_the_receivers_class(trust: Any) -> None:
    with pytest.raises(
        DecodeError, match=r"dataclass tests\.values\.Config has the fields name, layers, extra here"
    ) as e:
        arrive(_replaced([Config("n", [])], b"layers", b"lawyer"), trust=trust)
    assert "name, lawyer, extra at the sender" in str(e.value)
    with pytest.raises(DecodeError, match=r"namedtuple tests\.values\.Pair has the fields left, right here") as caught:
        arrive(_replaced({"a": [1, {Pair(1, 2): Pair(3, 4)}]}, b"left", b"lost"), trust=trust)
    assert caught.value.path == "obj['a'][1].key(?)"
    with pytest.raises(DecodeError, match=r"enum tests\.values\.Color has no member 'RAD' here"):
        arrive(_replaced([Color.RED], b"RED", b"RAD"), trust=trust)


def test_instances_with_too_many_or_too_few_values_are_refused() -> None:
    for values in ([], [1], [1, 2, 3]):
        with pytest.raises(DecodeError, match="2 fields"):
            arrive(_message([["namedtuple", "tests.values", "Pair", ["left", "right"]]], _instance(0, *values)))
        with pytest.raises(DecodeError, match="2 attributes"):
            arrive(_message([["dataclass", "tests.values", "Frozen", ["key", "value"], None]], _instance(0, *values)))


@pytest.mark.parametrize("names", [["key", "key"], ["key", 5], ["a"] * 2, [["key"]]])
def test_attributes_that_are_no_names_are_refused(names: list[Any]) -> None:
    entry = ["dataclass", "tests.values", "Frozen", ["key", "value"], names]
    with pytest.raises(DecodeError):
        arrive(_message([entry], _instance(0, *names)))


def test_attributes_that_slots_have_no_room_for_are_refused() -> None:
    entry = ["dataclass", "tests.values", "Slotted", ["a", "b"], ["a", "c"]]
    with pytest.raises(DecodeError, match="no attribute 'c'"):
        arrive(_message([entry], _instance(0, 1, 2)))


# -- keys, factories, numbers ------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class LoudKey:
    x: Any

    def __hash__(self) -> int:
        ran.append("hash")
        return 1

    def __eq__(self, other: object) -> bool:
        ran.append("eq")
        return self is other


class LoudNamed(NamedTuple):
    x: Any

    def __hash__(self) -> int:
        ran.append("hash")
        return 1


KEYED = [
    lambda key: {key: 1},
    lambda key: {(1, key): 1},
    lambda key: {1: {frozenset([key])}},
    lambda key: {key},
    lambda key: OrderedDict([(key, 1)]),
    lambda key: defaultdict(None, [(key, 1)]),
    lambda key: {Frozen((key,)): 1},
]


@pytest.mark.parametrize("make", KEYED)
@pytest.mark.parametrize("key", [LoudKey, LoudNamed])
def test_keys_whose_class_hashes_by_itself_are_refused(make: Callable[[Any], Any], key: Callable[[Any], Any]) -> None:
    encoded = encode([make(key(1))], trust="restricted")
    ran.clear()
    with pytest.raises(TrustError, match="own __hash__ or __eq__"):
        arrive(encoded, trust="restricted")
    assert ran == []
    arrive(encoded)
    assert ran
    ran.clear()


def test_such_instances_may_be_values_and_other_keys_are_fine() -> None:
    loud = LoudKey(1)
    received = loopback([{"a": loud, (1, Color.RED): [loud], Frozen(2): 3}], trust="restricted")[0]
    assert received["a"].x == 1
    assert received[1, Color.RED][0].x == 1
    assert received[Frozen(2)] == 3
    assert ran == []


@dataclasses.dataclass
class Callee:
    x: Any = None

    def __call__(self) -> Any:
        ran.append("call")

    def __index__(self) -> int:
        ran.append("index")
        return 1

    def __lt__(self, other: object) -> bool:
        ran.append("lt")
        return True

    __gt__ = __le__ = __ge__ = __lt__

    @property
    def shape(self) -> Any:
        ran.append("shape")
        return ()

    @property
    def dtype(self) -> Any:
        ran.append("dtype")
        return None

    def __iter__(self) -> Any:
        ran.append("iter")
        return iter(())

    def __len__(self) -> int:
        ran.append("len")
        return 1


CALLEE = ["dataclass", __name__, "Callee", ["x"], None]


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        (codes.DEFAULT_DICT, [], []),
        (codes.DEQUE, [], [1, 2]),
        (codes.RANGE, [], [1, 1]),
        (codes.RANGE, [1, 2], []),
        (codes.SIZE, [], [1]),
        (codes.DATETIME, [2000, 1], [1, 1, 1, 1, 0, None]),
        (codes.DATETIME, [2000, 1, 1, 1, 1, 1, 1, 0], []),
        (codes.TIME, [], [1, 1, 1, 0, None]),
        (codes.TIMEZONE, [], []),
        (codes.NUMPY_RECORD, [], []),
        (codes.NUMPY_RECORD_DTYPE, [], []),
    ],
)
def test_instances_in_place_of_numbers_are_not_asked(code: int, before: list[Any], after: list[Any]) -> None:
    mark = msgpack.ExtType(code, b"")
    encoded = _message([CALLEE], [mark, *before, _instance(0, 1), *after])
    with pytest.raises((DecodeError, TrustError)):
        arrive(encoded, trust="restricted")
    assert ran == []


@pytest.mark.parametrize("name", [name for name, entry in registry._entries.items() if not entry.code])
def test_instances_in_place_of_the_parts_of_a_composite_are_not_asked(name: str) -> None:
    encoded = encode(1)
    for count in range(8):
        tables = msgpack.packb([None, [name], [CALLEE], None, 0])
        composites = msgpack.packb([[msgpack.ExtType(codes.DEFINITION, b""), *[_instance(0, 1)] * count]])
        header = struct.pack("<BII", 1, len(tables), len(composites))
        encoded.skeleton = header + tables + composites + msgpack.packb(msgpack.ExtType(codes.COMPOSITE, b""))
        with pytest.raises((DecodeError, TrustError)):
            arrive(encoded, trust="restricted")
        assert ran == []


def test_a_factory_is_none_or_a_builtin_type() -> None:
    assert loopback(defaultdict(list), trust="restricted").default_factory is list
    with pytest.raises(TrustError):
        encode(defaultdict(Plain), trust="restricted")


# -- composites --------------------------------------------------------------------------------------------------------


def test_composites_that_hold_code_are_refused_on_both_ends() -> None:
    registry.register(
        "test.Code",
        lambda obj: type(obj) is Plain,
        lambda obj: [1],
        lambda parts: ran.append("rebuild"),
        code=True,
        base=Plain,
    )
    try:
        with pytest.raises(TrustError, match="holds code") as caught:
            encode({"a": Plain()}, trust="restricted")
        assert caught.value.path == "obj['a']"
        encoded = encode({"a": Plain()})
        with pytest.raises(TrustError, match=r"test\.Code"):
            arrive(encoded, trust="restricted")
        assert ran == []
    finally:
        registry.unregister("test.Code")


def test_a_registered_type_is_carried_in_restricted_trust() -> None:
    registry.register("test.Plain", lambda obj: True, lambda obj: [obj.x], lambda parts: Plain(x=parts[0]), base=Plain)
    try:
        assert loopback([Plain(x=(1, torch.ones(2)))], trust="restricted")[0].x[0] == 1
        with pytest.raises(TrustError) as caught:
            encode({"a": Plain(x=[lambda: 1])}, trust="restricted")
        assert caught.value.path == "obj['a'].x[0]"
        with pytest.raises(TrustError, match="as one of its parts") as caught:
            encode({"a": Plain(x=[{"c": Color.RED}])}, trust="restricted")
        assert caught.value.path == "obj['a']"
    finally:
        registry.unregister("test.Plain")


def test_errors_name_what_to_do() -> None:
    with pytest.raises(TrustError, match=r"obj\['a'\]\[0\].*cluster trust"):
        encode({"a": [lambda: 1]}, trust="restricted")
    with pytest.raises(EncodeError, match=r"obj\[0\].*send bytes"):
        encode([memoryview(b"")], trust="restricted")
