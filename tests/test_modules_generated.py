"""Generated modules: what a class is, is told by its source and not by its name."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import math
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import objcomm
from objcomm.codec import encode, fingerprint, generated, modulesource, rebuilding, units
from objcomm.errors import DecodeError, EncodeError, PeerError, UsageError
from tests import lowering
from tests.loopback import arrive, loopback
from tests.ranks import run_ranks

NAME = "generated_for_tests"

SOURCE = """
import dataclasses
import enum
import torch

SCALE = {scale}

def helper(x):
    return x * SCALE

class Base(torch.nn.Module):
    kind = "base"

class GenModel(Base):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return helper(x) {sign} self.weight

    class Inner:
        def value(self):
            return {scale}

@dataclasses.dataclass
class Record:
    x: int

    def value(self):
        return self.x * {scale}

class Color(enum.Enum):
    RED = {scale}

    def value_of(self):
        return SCALE
"""


def source(scale: int, sign: str = "+") -> str:
    return SOURCE.format(scale=scale, sign=sign)


def write(folder: Path, text: str, name: str = NAME) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def load(path: Path, name: str = NAME, *, enter: bool = True) -> Any:
    """Load a file as a module of that name, as a program does that generates code."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if enter:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop(NAME, None)
    generated._registered.discard(NAME)
    generated._found.clear()
    rebuilding._rebuilt.clear()
    importlib.invalidate_caches()


def output(model: Any) -> list[float]:
    values: list[float] = model(torch.tensor([1.0, 10.0])).tolist()
    return values


# -- between ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_two_classes_of_one_name_arrive_as_two(backend: str, tmp_path: Path) -> None:
    """The receiver has a third one, under the same name on its path, and a fourth one loaded."""
    paths = [write(tmp_path / f"folder{scale}", source(scale)) for scale in (2, 3, 4, 5)]

    def ranks(rank: int) -> None:
        if rank == 0:
            first, second = load(paths[0]), load(paths[1])
            models = [first.GenModel(), second.GenModel()]
            models[0].weight.data.fill_(7)
            expected = [output(model) for model in models]
            objcomm.send_object([models, expected, models[0].weight], 1)
            objcomm.send_object([first.GenModel.Inner(), second.GenModel.Inner(), first.helper, second.helper], 1)
            objcomm.send_object([first.Record(1), second.Record(1), first.Color.RED, second.Color.RED], 1)
        else:
            sys.path.insert(0, str(paths[2].parent))
            own = load(paths[3])
            models, expected, weight = objcomm.recv_object(0)
            assert [output(model) for model in models] == expected == [[9.0, 27.0], [4.0, 31.0]]
            assert models[0].weight is weight
            kinds = [type(model) for model in models]
            assert len({*kinds, own.GenModel}) == 3
            assert {kind.__qualname__ for kind in kinds} == {"GenModel"}
            inner = objcomm.recv_object(0)
            assert [inner[0].value(), inner[1].value(), inner[2](1), inner[3](1)] == [2, 3, 2, 3]
            values = objcomm.recv_object(0)
            assert [values[0].value(), values[1].value()] == [2, 3]
            assert [values[2].value_of(), values[3].value_of()] == [2, 3]
            assert output(own.GenModel()) == [6.0, 51.0]
            assert sys.modules[NAME] is own

    run_ranks(ranks, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_the_receivers_own_class_is_taken_if_it_is_the_same(backend: str, tmp_path: Path) -> None:
    path = write(tmp_path / "one", source(2))
    copy = write(tmp_path / "two", source(2))

    def ranks(rank: int) -> None:
        if rank == 0:
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(NAME)
            objcomm.register_generated(module)
            objcomm.send_object([module.GenModel(), module.helper], 1)
        else:
            sys.path.insert(0, str(copy.parent))
            model, helper = objcomm.recv_object(0)
            own = importlib.import_module(NAME)
            assert type(model) is own.GenModel
            assert helper is own.helper

    run_ranks(ranks, backend=backend)


def test_two_senders_give_one_class(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"folder{rank}", source(2)) for rank in range(3)]

    def ranks(rank: int) -> None:
        module = load(paths[rank])
        if rank < 2:
            objcomm.send_object(module.GenModel(), 2)
        else:
            vars(module).pop("__file__")
            del sys.modules[NAME]
            received = [objcomm.recv_object(0), objcomm.recv_object(1)]
            assert type(received[0]) is type(received[1]) is not module.GenModel

    run_ranks(ranks, 3)


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_code_by_name_that_differs_is_an_error(backend: str, tmp_path: Path) -> None:
    """Both ranks find the module by an ordinary import, each on its own path, and neither has said that it differs."""
    paths = [write(tmp_path / f"folder{scale}", source(scale)) for scale in (2, 3)]

    def ranks(rank: int) -> None:
        sys.path.insert(0, str(paths[rank].parent))
        module = importlib.import_module(NAME)
        for send in (module.GenModel, lambda: module.helper, lambda: module.Record(1), lambda: module.Color.RED):
            if rank == 0:
                objcomm.send_object({"m": send()}, 1)
            else:
                with pytest.raises(DecodeError, match=f"{NAME}.* is other code here") as caught:
                    objcomm.recv_object(0)
                assert str(paths[1]) in str(caught.value)
                assert "register_generated" in str(caught.value)
        if rank == 0:
            objcomm.register_generated(module)
            objcomm.send_object([module.GenModel(), module.Record(1)], 1)
        else:
            model, record = objcomm.recv_object(0)
            assert output(model) == [3.0, 21.0]
            assert record.value() == 2
            assert type(model) is not module.GenModel

    run_ranks(ranks, backend=backend)


def test_code_that_does_not_run_here_is_an_error_on_the_receiver(tmp_path: Path) -> None:
    path = write(tmp_path / "one", "import os\nos.environ['ONLY_ON_RANK_0']\nclass GenModel:\n    def f(self): pass\n")

    def ranks(rank: int) -> None:
        if rank == 0:
            import os

            os.environ["ONLY_ON_RANK_0"] = ""
            objcomm.send_object({"m": load(path).GenModel()}, 1)
            objcomm.send_object(1, 1)
        else:
            with pytest.raises(DecodeError, match="cannot be made here: KeyError: 'ONLY_ON_RANK_0'") as caught:
                objcomm.recv_object(0)
            assert caught.value.path == "obj['m']"
            assert objcomm.recv_object(0) == 1

    run_ranks(ranks)


def test_a_source_that_is_gone_is_an_error_on_both_ranks(tmp_path: Path) -> None:
    path = write(tmp_path / "one", source(2))

    def ranks(rank: int) -> None:
        if rank == 0:
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(NAME)
            write(path.parent, source(3, "-"))
            generated._registered.add(NAME)
            with pytest.raises(EncodeError, match="as it was at import is not known any more"):
                objcomm.send_object(module.GenModel(), 1)
        else:
            with pytest.raises(PeerError, match="as it was at import"):
                objcomm.recv_object(0)

    run_ranks(ranks)


# -- identity ----------------------------------------------------------------------------------------------------------


def test_modules_themselves_are_told_by_their_source(tmp_path: Path) -> None:
    first, second = load(write(tmp_path / "one", source(2))), load(write(tmp_path / "two", source(3)))

    def uses() -> Any:
        return first.helper(1), second.helper(1)

    encoded = encode([first, second, uses, first.GenModel()])
    load(write(tmp_path / "three", source(4)))
    its_first, its_second, its_uses, model = arrive(encoded)
    assert (its_first.SCALE, its_second.SCALE) == its_uses() == (2, 3)
    assert its_first.GenModel is type(model)
    sys.path.insert(0, str(tmp_path / "one"))
    del sys.modules[NAME]
    ordinary = importlib.import_module(NAME)
    encoded = encode({"m": [ordinary]})
    assert arrive(encoded)["m"][0] is ordinary
    sys.path.insert(0, str(tmp_path / "three"))
    del sys.modules[NAME]
    with pytest.raises(DecodeError, match="is other code here") as caught:
        arrive(encoded)
    assert caught.value.path == "obj['m'][0]"
    assert loopback([math, torch, sys]) == [math, torch, sys]


def test_a_class_keeps_the_name_that_it_was_given_after_import(tmp_path: Path) -> None:
    module = load(write(tmp_path, source(2)))
    module.GenModel.__name__, module.GenModel.__qualname__ = "Left", "Parent.Left"
    sent = module.GenModel()
    received = loopback(sent)
    assert type(received) is module.GenModel
    encoded = encode([sent, module.Record(3)])
    sys.modules[NAME] = load(write(tmp_path / "other", source(3)))
    received, record = arrive(encoded)
    assert type(received).__qualname__ == "Parent.Left"
    assert type(received).__name__ == "Left"
    assert type(received).__module__ == NAME
    assert output(received) == [3.0, 21.0]
    assert record.value() == 6
    assert type(arrive(encoded)[0]) is type(received)


def test_one_source_under_two_names_is_two_classes(tmp_path: Path) -> None:
    """nnScaler loads one file for two submodules and names the classes apart."""
    path = write(tmp_path, source(2))
    left, right = load(path), load(path)
    left.GenModel.__qualname__, right.GenModel.__qualname__ = "Parent.left", "Parent.right"
    encoded = encode([left.GenModel(), right.GenModel(), left.GenModel()])
    del sys.modules[NAME]
    received = arrive(encoded)
    assert [type(model).__qualname__ for model in received] == ["Parent.left", "Parent.right", "Parent.left"]
    assert type(received[0]) is type(received[2])


def test_what_arrives_can_be_sent_on(tmp_path: Path) -> None:
    module = load(write(tmp_path, source(2)))
    encoded = encode([module.GenModel(), module.Color.RED, module.Base, module.helper])
    del sys.modules[NAME]
    received = arrive(encoded)
    again = loopback(received)
    assert [type(again[0]), again[1], again[2], again[3]] == [type(received[0]), *received[1:]]
    assert again[1] is received[1]


def test_a_file_that_was_written_anew_does_not_change_what_was_imported(tmp_path: Path) -> None:
    first = load(write(tmp_path, source(2)))
    encode(first.GenModel())
    second = load(write(tmp_path, source(3)))
    encoded = encode([first.GenModel(), second.GenModel()])
    del sys.modules[NAME]
    assert [output(model) for model in arrive(encoded)] == [[3.0, 21.0], [4.0, 31.0]]


@pytest.mark.parametrize("later", [source(3), source(2, "-"), source(2).replace('"base"', '"other"')])
def test_a_source_that_does_not_fit_is_not_sent(tmp_path: Path, later: str) -> None:
    """Nobody looked at the module before its file was written anew: its code travels, not what the file holds now."""
    path = write(tmp_path, source(2))
    first = load(path)
    load(write(tmp_path, later))
    linecache.clearcache()
    assert modulesource.source_of(vars(first)) is None
    received = loopback(first.GenModel())
    assert output(received) == [3.0, 21.0]
    assert received.kind == "base"


def test_a_module_that_is_loaded_again_is_another_one(tmp_path: Path) -> None:
    path = write(tmp_path, source(2))
    sys.path.insert(0, str(tmp_path))
    module = importlib.import_module(NAME)
    objcomm.register_generated(module)
    old = encode(module.GenModel())
    write(tmp_path, source(31))
    importlib.reload(module)
    new = encode(module.GenModel())
    del sys.modules[NAME]
    path.unlink()
    assert [output(arrive(encoded)) for encoded in (old, new)] == [[3.0, 21.0], [32.0, 311.0]]


def test_code_without_a_file(tmp_path: Path) -> None:
    def make(scale: int) -> Any:
        module = types.ModuleType(NAME)
        sys.modules[NAME] = module
        exec(compile(source(scale), "<made up>", "exec"), vars(module))
        return module

    module = make(2)
    encoded = encode(module.GenModel())
    assert type(arrive(encoded)) is module.GenModel
    make(3)
    with pytest.raises(DecodeError, match="is other code here"):
        arrive(encoded)
    objcomm.register_generated(module, source=source(2))
    sys.modules[NAME] = module
    encoded = encode(module.GenModel())
    make(3)
    assert output(arrive(encoded)) == [3.0, 21.0]


def test_a_package_is_registered_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    write(folder, "")
    (folder / "__init__.py").write_text("")
    write(folder, source(2), "inside")
    sys.path.insert(0, str(tmp_path))
    objcomm.register_generated(NAME)
    module = importlib.import_module(f"{NAME}.inside")
    assert generated.owns(module.GenModel)
    assert not generated.owns(torch.nn.Linear)
    encoded = encode(module.GenModel())
    del sys.modules[f"{NAME}.inside"]
    write(folder, source(3), "inside")
    assert output(arrive(encoded)) == [3.0, 21.0]
    sys.modules.pop(f"{NAME}.inside", None)


def test_relative_imports_of_generated_code(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    write(folder, "", "__init__")
    write(folder, "VALUE = 5\n", "beside")
    write(folder, "from . import beside\nclass Model:\n    def value(self):\n        return beside.VALUE\n", "inside")
    sys.path.insert(0, str(tmp_path))
    objcomm.register_generated(NAME)
    module = importlib.import_module(f"{NAME}.inside")
    encoded = encode(module.Model())
    del sys.modules[f"{NAME}.inside"]
    (folder / "inside.py").unlink()
    importlib.invalidate_caches()
    assert arrive(encoded).value() == 5
    for name in ("inside", "beside"):
        sys.modules.pop(f"{NAME}.{name}", None)


def test_dataclasses_of_rebuilt_code(tmp_path: Path) -> None:
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    module = load(write(tmp_path, f"{head}@dataclass\nclass Model:\n    n: int = 3\n"))
    objcomm.register_generated(module)
    encoded = encode(module.Model(4))
    del sys.modules[NAME]
    arrived = arrive(encoded)
    assert arrived.n == 4
    assert arrived == type(arrived)(4)
    assert NAME not in sys.modules


def test_tracebacks_of_rebuilt_code_show_its_lines(tmp_path: Path) -> None:
    text = "class Model:\n    def fail(self):\n        raise ValueError('on purpose')  # here\n"
    module = load(write(tmp_path, text))
    encoded = encode(module.Model())
    del sys.modules[NAME]
    with pytest.raises(ValueError, match="on purpose") as caught:
        arrive(encoded).fail()
    assert "# here" in str(caught.traceback[-1].statement)


def test_rebuilt_code_can_be_scripted(tmp_path: Path) -> None:
    module = load(write(tmp_path, source(2).replace("return helper(x) + self.weight", "return x + self.weight")))
    encoded = encode(module.GenModel())
    del sys.modules[NAME]
    received = arrive(encoded)
    scripted = loopback([lowering.script(received), received])
    assert [output(model) for model in scripted] == [[2.0, 11.0], [2.0, 11.0]]


@pytest.mark.parametrize("options", [["-O"], ["-OO"]])
def test_an_optimizing_interpreter_has_the_same_code(options: list[str], tmp_path: Path) -> None:
    write(tmp_path, source(2).replace("    def forward", '    "documented"\n\n    def forward'))
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import {NAME}; from objcomm.codec import versions; print(versions.version({NAME}.GenModel).code)"
    )
    plain, optimized = (
        subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True).stdout
        for flags in ([], options)
    )
    assert plain.split("|")[:2] == optimized.split("|")[:2]
    assert plain.split("|")[1]
    assert not fingerprint.differ(plain, optimized)


# -- ordinary code -----------------------------------------------------------------------------------------------------


def test_ordinary_code_is_not_taken_for_generated() -> None:
    from tests import values

    for obj in (values.Plain, values.function, torch.nn.Linear, Path, dict, run_ranks, pytest.Item):
        assert not generated.owns(obj)
    encoded = encode(values.Plain(a=1))
    assert encoded.inline_bytes < 400


def test_comments_do_not_make_other_code(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    write(tmp_path, source(2))
    module = importlib.import_module(NAME)
    encoded = encode([module.GenModel(), module.Record(1)])
    del sys.modules[NAME]
    write(tmp_path, "# a comment, and other lines\n\n" + source(2).replace("def helper", "\n\ndef helper"))
    received = arrive(encoded)
    assert output(received[0]) == [3.0, 21.0]
    assert type(received[0]) is sys.modules[NAME].GenModel


def test_counters_do_not_make_other_code(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    write(tmp_path, source(2))
    module = importlib.import_module(NAME)
    encoded = encode(module.GenModel())
    vars(module)["SCALE"] = 100
    vars(module).pop(modulesource._KEPT, None)
    vars(module).pop(fingerprint._KEPT, None)
    assert type(arrive(encoded)) is module.GenModel
    assert type(loopback(module.GenModel())) is module.GenModel


def test_patched_code_is_not_compared(tmp_path: Path) -> None:
    """What a program has replaced in a module is not what any file says: the class is found by its name."""
    sys.path.insert(0, str(tmp_path))
    write(tmp_path, source(2))
    module = importlib.import_module(NAME)

    def forward(self: Any, x: Any) -> Any:
        return x

    module.GenModel.forward = forward
    assert type(loopback(module.GenModel())) is module.GenModel


def test_a_name_is_registered_or_a_module() -> None:
    with pytest.raises(UsageError, match="a module or the name"):
        objcomm.register_generated(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no module"):
        objcomm.register_generated("there_is_none", source="")


# -- a codec that takes names for identity -----------------------------------------------------------------------------


def test_a_codec_by_name_would_be_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = load(write(tmp_path / "one", source(2))), load(write(tmp_path / "two", source(3)))
    models = [first.GenModel(), second.GenModel()]
    expected = [output(model) for model in models]
    assert [output(model) for model in loopback(models)] == expected
    monkeypatch.setattr(units, "reduce", lambda obj: _by_name(obj) if obj.__module__ == NAME else None)
    with pytest.raises(AssertionError):
        assert [output(model) for model in loopback(models)] == expected


def _by_name(obj: Any) -> Any:
    return _look_up, (obj.__module__, obj.__qualname__)


def _look_up(module: str, qualname: str) -> Any:
    return getattr(sys.modules[module], qualname)
