"""What must not be loaded or sent: damaged archives, backends that are not here, code in restricted trust."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import objcomm
from objcomm.codec import archive, encode, script, scripttree
from objcomm.errors import DecodeError, EncodeError, PeerError, TrustError
from tests import lowering
from tests.loopback import arrive, loopback
from tests.lowering import Basic, Pair, Stateful, Sum, lower, saved
from tests.ranks import run_ranks
from tests.same import assert_arrived

_C: Any = torch._C


@pytest.fixture(scope="module", autouse=True)
def backends() -> None:
    lowering.load_backends()


# -- damaged archives --------------------------------------------------------------------------------------------------


def rewritten(data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """An archive whose files have gone through ``change``."""
    reader = _C.PyTorchFileReader(io.BytesIO(data))
    file = io.BytesIO()
    writer = _C.PyTorchFileWriter(file)
    for name in reader.get_all_records():
        if name not in ("version", "byteorder", ".data/serialization_id"):
            content = change(name, reader.get_record(name))
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return file.getvalue()


def without_setstate(data: bytes, which: int = 0) -> bytes:
    """An archive that has lost one ``__setstate__``, as one did when two lowered modules had one name."""
    left = [which]

    def change(name: str, content: bytes) -> bytes:
        start = content.find(b"  def __setstate__")
        if not name.endswith(".py") or start < 0:
            return content
        left[0] -= 1
        if left[0] >= 0:
            return content
        end = content.find(b"\n  def ", start + 1)
        return content[:start] + (content[end + 1 :] if end >= 0 else b"")

    return rewritten(data, change)


def twice(data: bytes) -> bytes:
    """An archive that defines one of its lowered classes twice."""

    def change(name: str, content: bytes) -> bytes:
        return content + content if "LoweredModule" in name and name.endswith(".py") else content

    return rewritten(data, change)


def two() -> list[Any]:
    return [lower(Basic(1)), lower(Basic(2))]


@pytest.mark.parametrize("which", [0, 1])
def test_an_archive_that_lost_a_setstate_is_refused_before_loading(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    good = script._save([module._c for module in two()], [])
    assert len([each for each in archive.scan(good).classes.values() if each.lowered]) == 2
    bad = without_setstate(good, which)
    with pytest.raises(DecodeError, match="no __setstate__ for the lowered module"):
        archive.scan(bad)
    loads: list[Any] = []
    monkeypatch.setattr(torch._C, "import_ir_module_from_buffer", lambda *args: loads.append(args))
    with pytest.raises(DecodeError, match="__setstate__"):
        script._load([bad, None, [None, None], 0, [], [], []])
    assert not loads


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (twice, "twice"),
        (lambda data: data[: len(data) // 2], "malformed"),
        (lambda data: rewritten(data, lambda name, content: b"" if name == "data.pkl" else content), "malformed"),
        (
            lambda data: rewritten(data, lambda name, content: b"" if "LoweredModule" in name else content),
            "does not define",
        ),
    ],
)
def test_other_damage_is_refused_before_loading(change: Callable[[bytes], bytes], complaint: str) -> None:
    good = script._save([module._c for module in two()], [])
    with pytest.raises(DecodeError, match=complaint):
        archive.scan(change(good))


def test_a_class_with_a_state_of_its_own_needs_its_setstate() -> None:
    good = saved(lowering.script(Stateful(2.0)))
    archive.scan(good)
    with pytest.raises(DecodeError, match="no __setstate__ for the class"):
        archive.scan(without_setstate(good))

    def neither(name: str, content: bytes) -> bytes:
        return content.replace(b"__setstate__", b"set_state").replace(b"__getstate__", b"get_state")

    with pytest.raises(DecodeError, match="state needs a __setstate__"):
        archive.scan(rewritten(good, neither))


def test_reading_an_archive_runs_nothing_of_it() -> None:
    def change(name: str, content: bytes) -> bytes:
        return b"cbuiltins\nexec\n(Vimport sys; sys.never = 1\ntR." if name == "data.pkl" else content

    with pytest.raises(DecodeError, match="does not define"):
        archive.scan(rewritten(saved(lowering.script(Sum())), change))
    assert not hasattr(sys, "never")


def test_what_is_loaded_is_compared_with_what_was_sent() -> None:
    modules = [lowering.script(Pair(Basic(1), Basic(2)))._c]
    data = script._save(modules, [])
    sent = scripttree.manifest(modules)
    assert script._load([data, None, [None], 0, sent, [], []]).module(0).left.weight[0] == 1
    for change in ([1, "other"], [2, 7], [3, 7], [4, ["other"]], [5, True], [6, []]):
        wrong = [list(sent[0]), *sent[1:]]
        wrong[0][change[0]] = change[1]
        with pytest.raises(DecodeError, match="not loaded as what was sent"):
            script._load([data, None, [None], 0, wrong, [], []])
    with pytest.raises(DecodeError, match="not loaded as what was sent"):
        script._load([data, None, [None], 0, sent[:-1], [], []])


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_a_damaged_archive_between_ranks(backend: str) -> None:
    def ranks(rank: int) -> None:
        lowering.load_backends()
        if rank == 0:
            contents = archive.Contents(locations={"cpu"})
            whole_save, whole_scan = script._save, archive.scan
            script._save = lambda *args: without_setstate(whole_save(*args))
            archive.scan = lambda data: contents
            objcomm.send_object({"two": two()}, 1)
            script._save, archive.scan = whole_save, whole_scan
            objcomm.send_object({"two": two()}, 1)
        else:
            with pytest.raises(DecodeError, match="__setstate__") as caught:
                objcomm.recv_object(0)
            assert str(caught.value.path).startswith("obj['two'][")
            received = objcomm.recv_object(0)["two"]
            assert [float(lowering.weight_of(module)[0]) for module in received] == [1.0, 2.0]

    run_ranks(ranks, backend=backend)


# -- backends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_a_backend_that_the_receiver_does_not_have(backend: str) -> None:
    from tests.test_modules_lowered import lite

    def ranks(rank: int) -> None:
        if rank == 0:
            lowering.load_backends()
            objcomm.send_object({"a": [lower(Basic(1))]}, 1)
            objcomm.send_object([lite(lower(Basic(1)))], 1)
            for module in (lower(Basic(1), lowering.UNAVAILABLE), lite(lower(Basic(1)))):
                objcomm.send_object([module], 1)
            objcomm.send_object({"works": torch.arange(3)}, 1)
        else:
            for path in ("obj['a'][0]", "obj[0]"):
                with pytest.raises(DecodeError, match="backend 'test_backend', which is not known") as caught:
                    objcomm.recv_object(0)
                assert "load_library" in str(caught.value)
                assert caught.value.path == path
            lowering.load_backends()
            with pytest.raises(DecodeError, match="backend 'test_backend_unavailable', which is not available"):
                objcomm.recv_object(0)
            with lowering.quiet():
                assert objcomm.recv_object(0)[0](torch.ones(1), torch.ones(1))[0] == 2
            assert_arrived(objcomm.recv_object(0), {"works": torch.arange(3)})

    run_ranks(ranks, backend=backend)


# -- refused on send ---------------------------------------------------------------------------------------------------


def _unflattened() -> Any:
    with lowering.quiet():
        return torch.export.unflatten(torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1),)))


def _parametrized() -> Any:
    module = torch.nn.Linear(2, 2)
    parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    return module


def _exported_module() -> Any:
    with lowering.quiet():
        return torch.export.export(Sum(), (torch.ones(1), torch.ones(1))).module()


def _compiled_function() -> Any:
    return torch.compile(lambda x: x + 1)


class LoweredBackendModule(torch.nn.Module):
    """As ExecuTorch has it; the module is that of its real one."""

    __module__ = "executorch.exir.lowered_backend_module"

    def buffer(self) -> bytes:
        return b"flatbuffer"


class CallsPython(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same: torch.Tensor = self.ignored(x)
        return same

    @torch.jit.ignore
    def ignored(self, x):  # type: ignore[no-untyped-def]
        return x


class Number:
    def __init__(self, value: int) -> None:
        self.value = value


def number_value(number: Number) -> int:
    return number.value


def _takes_a_class() -> Any:
    lowering.script(Number)
    return lowering.script(number_value)


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("bare module", lambda: lower(Basic(1))._c, "ScriptModule around it"),
    ("bare stateful module", lambda: lowering.script(Stateful(1.0))._c, "ScriptModule around it"),
    ("method", lambda: lowering.script(Sum()).forward, "send the module"),
    ("exported module", _exported_module, "send the ExportedProgram"),
    ("compiled function", _compiled_function, "given to torch.compile"),
    ("unflattened", _unflattened, "unflatten it on the receiver"),
    ("parametrized", _parametrized, "state_dict"),
    ("executorch", LoweredBackendModule, "buffer"),
    ("calls python", lambda: lowering.script(CallsPython()), "Python function call 'ignored'"),
    ("function of classes", _takes_a_class, "scripted module with a method"),
]


@pytest.mark.parametrize(("name", "make", "alternative"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_it_is_refused_with_the_alternative(name: str, make: Callable[[], Any], alternative: str) -> None:
    obj = make()
    with pytest.raises(EncodeError) as caught:
        encode({"a": [1, obj]})
    assert alternative in str(caught.value)
    assert caught.value.path is not None
    assert caught.value.path.startswith("obj['a'][1]")
    holder = torch.nn.Module()
    holder.__dict__["inside"] = obj
    with pytest.raises(EncodeError) as caught:
        encode([holder, lower(Basic(1))])
    assert alternative in str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_refusals_reach_both_ranks_and_end_nobody(backend: str) -> None:
    def ranks(rank: int) -> None:
        lowering.load_backends()
        for _, make, alternative in REFUSED:
            if rank == 0:
                with pytest.raises(EncodeError, match=alternative):
                    objcomm.send_object([make()], 1)
            else:
                with pytest.raises(PeerError, match=r"EncodeError.*path obj\[0\]"):
                    objcomm.recv_object(0)
        if rank == 0:
            objcomm.send_object([lower(Basic(1))], 1)
        else:
            assert float(lowering.weight_of(objcomm.recv_object(0)[0])[0]) == 1

    run_ranks(ranks, backend=backend)


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def test_a_pickle_with_a_bare_script_object_is_refused() -> None:
    """It would end the process that unpickles it; a sender of another kind may send one."""
    bare = lowering.script(Stateful(1.0))._c
    _, arguments, state, *_ = bare.__reduce_ex__(5)

    class Fake:
        def __reduce__(self) -> Any:
            return _new, arguments, state

    with pytest.raises(DecodeError, match="bare script object"):
        loopback([Fake()])


# -- restricted trust --------------------------------------------------------------------------------------------------

ran: list[str] = []


class Noisy(torch.nn.Module):
    """It leaves a trace wherever its code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def __setstate__(self, state: Any) -> None:
        ran.append("setstate")
        super().__setstate__(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Prints(torch.nn.Module):
    """TorchScript whose restoring can be seen from outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> bool:
        return self.training

    @torch.jit.export
    def __setstate__(self, state: bool) -> None:
        print("restored")
        self.training = state


def _fx() -> Any:
    return torch.fx.symbolic_trace(Noisy())


def _exported() -> Any:
    with lowering.quiet():
        return torch.export.export(Sum(), (torch.ones(1), torch.ones(1)))


def _generated() -> Any:
    source = "from tests.test_modules_refused import ran\nran.append('import')\nclass Model:\n    def run(self): pass\n"
    module = types.ModuleType("tests_generated_model")
    sys.modules[module.__name__] = module
    exec(source, vars(module))
    objcomm.register_generated(module, source=source)
    del sys.modules[module.__name__]
    ran.clear()
    return module.Model()


def _lite() -> Any:
    from tests.test_modules_lowered import lite

    return lite(lower(Basic(1)))


CODE: list[tuple[str, Callable[[], Any]]] = [
    ("scripted", lambda: lowering.script(Prints())),
    ("function", lambda: lowering.script(_added)),
    ("lowered", lambda: lower(Basic(1))),
    ("lite", _lite),
    ("exported", _exported),
    ("fx", _fx),
    ("eager", Noisy),
    ("compiled", lambda: torch.compile(Noisy())),
    ("generated", _generated),
]


def _added(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(("name", "make"), CODE, ids=[name for name, _ in CODE])
def test_restricted_trust_refuses_code_on_both_ends(
    name: str, make: Callable[[], Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    obj = make()
    with pytest.raises(TrustError):
        encode({"a": obj}, trust="restricted")
    encoded = encode({"a": obj})
    ran.clear()
    capfd.readouterr()
    for owner, function in (
        (torch._C, "import_ir_module_from_buffer"),
        (torch._C, "_load_mobile_module_from_bytes"),
        (torch.export, "load"),
        (archive, "scan"),
    ):
        monkeypatch.setattr(owner, function, lambda *args: ran.append("loaded"))
    with pytest.raises(TrustError) as caught:
        arrive(encoded, trust="restricted")
    assert caught.value.path == "obj['a']"
    assert ran == []
    assert "restored" not in capfd.readouterr().out


def test_the_traces_would_show(capfd: pytest.CaptureFixture[str]) -> None:
    loopback([Noisy(), _generated()])
    assert sorted(ran) == ["import", "setstate"]
    ran.clear()
    loopback(lowering.script(Prints()))
    assert "restored" in capfd.readouterr().out


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_restricted_trust_between_ranks(backend: str, tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        lowering.load_backends()
        if rank == 1:
            objcomm.configure(trust="restricted")
        for _, make in CODE:
            if rank == 0:
                objcomm.send_object({"a": make()}, 1)
            else:
                with pytest.raises(TrustError):
                    objcomm.recv_object(0)
        if rank == 0:
            objcomm.send_object([1], 1)
        else:
            assert objcomm.recv_object(0) == [1]
            assert sys.modules[__name__].ran == []

    run_ranks(ranks, backend=backend)
