"""Classes and functions by name: other code under the name is found out, and the same code is never taken for other."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import unittest.mock
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import objcomm
from objcomm.codec import encode, fingerprint, generated, rebuilding
from objcomm.errors import DecodeError
from tests.loopback import arrive, loopback
from tests.ranks import run_ranks
from tests.test_modules_generated import load, write

NAME = "code_for_tests"

SOURCE = """
import dataclasses
import enum
import functools

REGISTRY = {{}}
total = 0

def helper(x):
    return x * {scale}

def counted(function):
    @functools.wraps(function)
    def call(*args):
        call.calls += 1
        return function(*args)
    call.calls = 0
    return call

class Base:
    made = 0
    def __init_subclass__(cls):
        REGISTRY[cls.__name__] = cls
    def shared(self):
        return 1

class Model(Base):
    "documented"
    def __init__(self):
        Base.made += 1
        self.__own = 3
    def value(self):
        return helper(1)
    def __private(self):
        return self.__own in {{"a", "b", 1, 2}}
    @functools.cached_property
    def kept(self):
        return 5
    @functools.lru_cache
    def cached(self, x):
        return x
    @counted
    def counted(self):
        return 2
    later = lambda self: 7

@dataclasses.dataclass
class Record:
    x: int = 0
    def value(self):
        return helper(self.x)

class Color(enum.Enum):
    RED = 1
    def number(self):
        return helper(self.value)

def _scratch():
    pass

@functools.lru_cache
def cached(x):
    return helper(x)

def swapped(self):
    return "swapped"
"""


def source(scale: int) -> str:
    return SOURCE.format(scale=scale)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    path, folder = list(sys.path), os.getcwd()
    yield
    os.chdir(folder)
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]
    generated._registered.discard(NAME)
    generated._found.clear()
    rebuilding._rebuilt.clear()
    importlib.invalidate_caches()


def everything(module: Any) -> list[Any]:
    members = [module.Model(), module.Record(1), module.Color.RED]
    return [*members, module.helper, module.cached, module.Model, module.Model.value, module]


def imported(folder: Path, text: str, name: str = NAME) -> Any:
    """The module as an ordinary import finds it."""
    write(folder, text, name)
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def assert_sent(received: Any) -> None:
    """It computes with the sender's number."""
    kind = type(received).__name__
    if isinstance(received, types.ModuleType):
        assert received.helper(1) == 2
    elif isinstance(received, type):
        assert received().value() == 2
    elif kind in ("Model", "Record"):
        assert received.value() == 2
    elif kind == "Color":
        assert received.number() == 2
    elif received.__name__ in ("helper", "cached"):
        assert received(1) == 2
    else:
        assert received(None) == 2


# -- other code --------------------------------------------------------------------------------------------------------


def sender_rewrites(rank: int, module: Any) -> None:
    if rank == 0:
        Path(module.__file__).write_text(source(9))


def receiver_rewrites(rank: int, module: Any) -> None:
    """Then its file says what the sender's does, and its classes are something else."""
    if rank == 1:
        Path(module.__file__).write_text(source(2))


def sender_removes(rank: int, module: Any) -> None:
    if rank == 0:
        os.remove(module.__file__)


def receiver_removes(rank: int, module: Any) -> None:
    if rank == 1:
        os.remove(module.__file__)


@pytest.mark.parametrize("backend", ["gloo", "strict"])
@pytest.mark.parametrize("by_import", [True, False])
def test_a_file_that_has_changed_hides_no_other_code(backend: str, by_import: bool, tmp_path: Path) -> None:
    changes = [sender_rewrites, receiver_rewrites, sender_removes, receiver_removes]

    def ranks(rank: int) -> None:
        for number, change in enumerate(changes):
            name, folder = f"{NAME}{number}", tmp_path / f"{number}-{rank}"
            module = (
                imported(folder, source(2 + rank), name)
                if by_import
                else load(write(folder, source(2 + rank), name), name)
            )
            change(rank, module)
            importlib.invalidate_caches()
            for obj in everything(module):
                if rank == 0:
                    objcomm.send_object(obj, 1)
                    continue
                if by_import:
                    with pytest.raises(DecodeError, match=r"is other code here .*register_generated"):
                        objcomm.recv_object(0)
                    continue
                try:
                    received = objcomm.recv_object(0)
                except DecodeError as error:
                    assert "is other code here" in str(error)  # noqa: PT017
                else:  # made from the source that the sender's module was made from
                    assert_sent(received)

    run_ranks(ranks, backend=backend)


@pytest.mark.parametrize("text", ["class P:\n    K = {}\n", "import enum\nclass P(enum.IntEnum):\n    K = {}\n"])
def test_constants_are_code_as_well(text: str, tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        module = imported(tmp_path / f"{rank}", text.format(2 + rank))
        apart = load(write(tmp_path / f"g{rank}", text.format(2 + rank), f"{NAME}_g"), f"{NAME}_g")
        if rank == 0:
            objcomm.send_object([module.P], 1)
            objcomm.send_object([apart.P], 1)
            return
        with pytest.raises(DecodeError, match="is other code here"):
            objcomm.recv_object(0)
        assert objcomm.recv_object(0)[0].K == 2

    run_ranks(ranks)


@pytest.mark.parametrize("text", ["class P:\n    K = {}\n", "class P:\n    def __init__(self):\n        self.K = {}\n"])
def test_code_that_was_never_in_a_file(text: str) -> None:
    def made(number: int) -> Any:
        module = sys.modules[NAME] = types.ModuleType(NAME)
        exec(text.format(number), vars(module))
        return module

    encoded = encode(made(2).P())
    assert type(arrive(encoded)) is sys.modules[NAME].P
    made(2)
    assert type(arrive(encoded)) is sys.modules[NAME].P
    made(3)
    with pytest.raises(DecodeError, match=r"is other code here \(made without a file\)"):
        arrive(encoded)


def test_what_a_class_derives_from_is_its_code(tmp_path: Path) -> None:
    """The class is the same on both ranks, and its base is a generated one."""
    child = f"import sys\nclass Child(sys.modules['{NAME}_base'].Model):\n    def more(self):\n        return 1\n"

    def ranks(rank: int) -> None:
        load(write(tmp_path / f"{rank}", source(2 + rank), f"{NAME}_base"), f"{NAME}_base")
        module = imported(tmp_path / f"child{rank}", child)
        if rank == 0:
            objcomm.send_object(module.Child(), 1)
            return
        with pytest.raises(DecodeError, match="Child, or what it derives from, is other code here"):
            objcomm.recv_object(0)

    run_ranks(ranks)


def test_functions_with_something_around_them(tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        module = imported(tmp_path / f"{rank}", source(2 + rank))
        apart = load(write(tmp_path / f"g{rank}", source(2 + rank), f"{NAME}_g"), f"{NAME}_g")
        if rank == 0:
            objcomm.send_object(apart.cached, 1)
            objcomm.send_object(module.cached, 1)
            return
        received = objcomm.recv_object(0)
        assert received(1) == 2
        assert type(received) is functools._lru_cache_wrapper
        with pytest.raises(DecodeError, match="is other code here"):
            objcomm.recv_object(0)

    run_ranks(ranks)


# -- the same code -----------------------------------------------------------------------------------------------------


def nothing(module: Any) -> None:
    pass


def commented(module: Any) -> None:
    path = Path(module.__file__)
    path.write_text("# a comment\n\n" + path.read_text().replace("class Model", "\n# another\nclass Model"))


def appended(module: Any) -> None:
    path = Path(module.__file__)
    path.write_text(path.read_text() + "\nimport math\nNEW = 3\nclass New:\n    pass\ndef new():\n    return NEW\n")


def constant_changed(module: Any) -> None:
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("total = 0", "total = 1"))


def removed(module: Any) -> None:
    os.remove(module.__file__)
    importlib.invalidate_caches()


def left(module: Any) -> None:
    sys.path.remove(str(Path(module.__file__).parent))
    importlib.invalidate_caches()


def counted(module: Any) -> None:
    module.Base.made, module.total = 100, 7
    module.REGISTRY["more"] = 1
    module.Model().counted()
    module.Model().kept  # noqa: B018
    module.cached(3)


def patched(module: Any) -> None:
    module.Model.value = lambda self: 99
    module.Record.value = nothing


def mocked(module: Any) -> None:
    unittest.mock.patch.object(module.Model, "value", autospec=True).start()
    unittest.mock.patch.object(module.Base, "shared").start()


def exchanged(module: Any) -> None:
    """By functions of the module itself."""
    module.Model.value = module.swapped
    module.Model.more = module.helper


def deleted(module: Any) -> None:
    del module._scratch


CHANGES: list[Callable[[Any], None]] = [
    nothing, commented, appended, constant_changed, removed, left, counted, patched, mocked, exchanged, deleted,
]  # fmt: skip


@pytest.mark.parametrize("before", CHANGES)
def test_the_same_code_is_taken_for_the_same(before: Callable[[Any], None], tmp_path: Path) -> None:
    """Whatever the program, or somebody with an editor, has done on one rank or on the other."""
    for number, after in enumerate(CHANGES):
        sent, found = (imported(tmp_path / f"{number}{end}", source(2)) if end == "a" else None for end in "ab")
        before(sent)
        encoded = [encode(obj) for obj in (sent.Model(), sent.Record(1), sent.Color.RED, sent.helper, sent.Model, sent)]
        del sys.modules[NAME]
        found = imported(tmp_path / f"{number}b", source(2))
        after(found)
        received = [arrive(each) for each in encoded]
        assert type(received[0]) is received[4] is found.Model
        assert type(received[1]) is found.Record
        assert received[2] is found.Color.RED
        assert received[3] is found.helper
        assert received[5] is found
        del sys.modules[NAME]
        unittest.mock.patch.stopall()


def test_other_ways_to_the_same_code(tmp_path: Path) -> None:
    """From an archive; without the source; for another optimization: on the receiver alone."""
    module = imported(tmp_path / "plain", source(2))
    encoded = [encode(obj) for obj in everything(module)]
    del sys.modules[NAME]
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "plain" / f"{NAME}.py", f"{NAME}.py")
    sys.path.insert(0, str(tmp_path / "archive.zip"))
    assert type(arrive(encoded[0])) is sys.modules[NAME].Model
    assert "archive.zip" in str(sys.modules[NAME].__file__)
    here = fingerprint.of(sys.modules[NAME].Model).split("|")
    assert not fingerprint.differ("|".join(["another interpreter", "x", *here[2:]]), "|".join(here))
    assert not fingerprint.differ("|".join([here[0], "", "other 2", "0" * 10]), "|".join(here))
    assert fingerprint.differ("|".join([here[0], "", here[2], "0" * 10]), "|".join(here))
    assert fingerprint.differ("|".join([here[0], "x", *here[2:]]), "|".join(here))


def test_what_this_process_has_loaded_again(tmp_path: Path) -> None:
    module = imported(tmp_path, source(2))
    old = module.Model()
    assert type(loopback(old)) is type(old)
    write(tmp_path, source(31), NAME)
    importlib.reload(module)
    assert type(loopback(module.Model())) is module.Model
    assert loopback(old).value() == old.value()
