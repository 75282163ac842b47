"""Generated modules that import others: what they import comes with them, or is compared."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import objcomm
from objcomm.codec import encode, generated, rebuilding
from objcomm.errors import DecodeError
from tests.loopback import arrive, loopback
from tests.ranks import run_ranks
from tests.test_modules_generated import load, write

NAME = "needs_for_tests"
BASE, MODEL = f"{NAME}_base", f"{NAME}_model"

BASE_SOURCE = "SCALE = {0}\nclass Base:\n    def value(self):\n        return {0}\ndef scaled(x):\n    return x * {0}\n"

# The ways in which one module uses another one.
USES = {
    "class": f"from {BASE} import Base\nclass Model(Base):\n    def f(self):\n        return self.value() + {{0}}\n",
    "module": f"import {BASE}\nclass Model({BASE}.Base):\n    def f(self):\n        return {BASE}.SCALE + {{0}}\n",
    "name": f"import {BASE} as b\nclass Model:\n    def f(self):\n        return b.Base().value() + {{0}}\n",
    "function": f"from {BASE} import scaled as s\nclass Model:\n    def f(self):\n        return s(1) + {{0}}\n",
    "constant": f"from {BASE} import SCALE\nclass Model:\n    def f(self):\n        return SCALE + {{0}}\n",
    "star": f"from {BASE} import *\nclass Model:\n    def f(self):\n        return SCALE + {{0}}\n",
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]
    generated._found.clear()
    generated._registered.discard(NAME)
    rebuilding._rebuilt.clear()
    rebuilding._own_digests.clear()
    importlib.invalidate_caches()


def made(folder: Path, text: str, name: str) -> Any:
    return load(write(folder, text, name), name)


@pytest.mark.parametrize("backend", ["gloo", "strict"])
@pytest.mark.parametrize("receiver", ["other", "nothing", "same"])
def test_generated_code_brings_the_generated_code_that_it_needs(backend: str, receiver: str, tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        for number, use in enumerate(USES.values()):
            scale = 2 if rank == 0 or receiver == "same" else 3
            folder = tmp_path / f"{rank}-{number}"
            base = model = None
            if rank == 0 or receiver != "nothing":
                base = made(folder, BASE_SOURCE.format(scale), BASE)
                model = made(folder, use.format(10), MODEL)
            if rank == 0:
                assert base is not None
                assert model is not None
                objcomm.send_object([model.Model(), base.Base()], 1)
            else:
                received, other = objcomm.recv_object(0)
                assert received.f() == 12
                assert other.value() == 2
                if len(type(received).__mro__) > 2:
                    assert isinstance(received, type(other))
                assert sys.modules.get(BASE) is base
                assert sys.modules.get(MODEL) is model
                if model is not None:
                    assert model.Model().f() == 10 + scale
                    assert (type(received) is model.Model) == (receiver == "same")
                assert type(loopback(received)) is type(received)

    run_ranks(ranks, backend=backend)


def test_modules_that_import_each_other_stay_those_of_this_process(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    write(folder, "", "__init__")
    write(folder, "from . import two\nclass One:\n    def f(self):\n        return two.VALUE\n", "one")
    write(folder, "VALUE = 5\nfrom . import one\nclass Two:\n    def f(self):\n        return one.One().f()\n", "two")
    sys.path.insert(0, str(tmp_path))
    objcomm.register_generated(NAME)
    one = importlib.import_module(f"{NAME}.one")
    two = importlib.import_module(f"{NAME}.two")
    for obj in (one.One(), two.Two()):
        received = loopback(obj)
        assert type(received) is type(obj)
        assert received.f() == 5


def test_inside_of_a_package(tmp_path: Path) -> None:
    """The package of the receiver has another module under the name, and has it again afterwards."""
    folder = tmp_path / NAME
    write(folder, "", "__init__")
    sys.path.insert(0, str(tmp_path))
    importlib.import_module(NAME)
    objcomm.register_generated(NAME)
    write(folder, BASE_SOURCE.format(2), "base")
    write(folder, "from . import base\nclass Model:\n    def f(self):\n        return base.SCALE\n", "model")
    model = importlib.import_module(f"{NAME}.model")
    encoded = encode(model.Model())
    for name in ("base", "model"):
        del sys.modules[f"{NAME}.{name}"]
        delattr(sys.modules[NAME], name)
    write(folder, BASE_SOURCE.format(33), "base")
    other = importlib.import_module(f"{NAME}.base")
    assert arrive(encoded).f() == 2
    assert sys.modules[NAME].base is other
    assert sys.modules[f"{NAME}.base"] is other
    assert other.SCALE == 33


def test_other_code_that_generated_code_needs_is_compared(tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        write(tmp_path / f"{rank}", BASE_SOURCE.format(2 + rank), BASE)
        sys.path.insert(0, str(tmp_path / f"{rank}"))
        model = made(tmp_path / f"model{rank}", USES["module"].format(10), MODEL)
        if rank == 0:
            objcomm.send_object(model.Model(), 1)
            objcomm.send_object("afterwards", 1)
        else:
            with pytest.raises(DecodeError, match=f"{BASE} is other code here"):
                objcomm.recv_object(0)
            assert objcomm.recv_object(0) == "afterwards"

    run_ranks(ranks)


def test_what_is_imported_in_a_function_has_to_be_here(tmp_path: Path) -> None:
    """When the function runs, its import finds what is here."""
    lazy = f"class Model:\n    def f(self):\n        from {BASE} import SCALE\n        return SCALE\n"
    made(tmp_path / "one", BASE_SOURCE.format(2), BASE)
    model = made(tmp_path / "one", lazy, MODEL)
    encoded = encode(model.Model())
    del sys.modules[MODEL]
    assert arrive(encoded).f() == 2
    del sys.modules[BASE]
    made(tmp_path / "two", BASE_SOURCE.format(3), BASE)
    rebuilding._rebuilt.clear()
    with pytest.raises(DecodeError, match=f"imports {BASE} in a function, and that is other code here"):
        arrive(encoded)


def test_code_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    text = "import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(3)\nclass Model:\n    def f(self): pass\n"

    def ranks(rank: int) -> None:
        if rank == 0:
            objcomm.send_object(made(tmp_path, text, MODEL).Model(), 1)
            objcomm.send_object("afterwards", 1)
        else:
            with pytest.raises(DecodeError, match="cannot be made here: SystemExit: 3"):
                objcomm.recv_object(0)
            assert objcomm.recv_object(0) == "afterwards"

    run_ranks(ranks)
