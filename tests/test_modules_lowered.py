"""Modules lowered to one backend stay the modules that they are: between two ranks, and saved and loaded after that."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import objcomm
from tests import lowering
from tests.loopback import loopback
from tests.lowering import COMPILER, PLAIN, Basic, Pair, Stateful, Sum, called, loaded, lower, saved, script
from tests.ranks import run_ranks
from tests.same import assert_arrived

X, H = torch.tensor([5.0]), torch.tensor([2.0])


def _seen(module: Any) -> list[Any]:
    """What a module returns for all that one may ask of it, as plain tensors and numbers."""
    if isinstance(module, torch.export.ExportedProgram):
        return [module.module()(X, H)]
    if isinstance(module, torch.Tensor):
        return [module]
    if hasattr(module, "restored"):
        return [module(X), module.factor]
    outputs = module(X, H)
    seen = list(outputs) if isinstance(outputs, tuple) else [outputs]
    seen += list(module.state_dict().values())
    if isinstance(module, torch.jit.ScriptModule) and module._c.hasattr(lowering.LOWERED):
        lowering.assert_alive(module)
        if lowering.inner(module).getattr(lowering.PROCESSED).__class__ is torch._C.ScriptModule:
            seen.append(lowering.weight_of(module))
    return seen


def check(received: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    """Each module works and is what it was; so it is after it has been saved and loaded once more."""
    assert list(received) == list(expected)
    for name, module in received.items():
        assert_arrived(
            [value.detach() if isinstance(value, torch.Tensor) else value for value in _seen(module)], expected[name]
        )
    for name, module in received.items():
        if isinstance(module, torch.jit.ScriptModule):
            again = [
                value.detach() if isinstance(value, torch.Tensor) else value for value in _seen(loaded(saved(module)))
            ]
            assert_arrived(again, expected[name])


def two_different() -> dict[str, Any]:
    return {"sum": lower(Sum(), COMPILER), "basic": lower(Basic(2))}


def one_name_two_codes() -> dict[str, Any]:
    return {"sum": lower(called("Same", "x + h")(), COMPILER), "difference": lower(called("Same", "x - h")(), COMPILER)}


def one_class_twice() -> dict[str, Any]:
    return {"one": lower(Basic(1)), "two": lower(Basic(2))}


def one_class_sixteen_times() -> dict[str, Any]:
    return {f"module {weight}": lower(Basic(weight)) for weight in range(16)}


def one_instance_twice() -> dict[str, Any]:
    module = lower(Basic(4))
    return {"first": module, "second": module, "parent": script(Pair(module, module))}


def nested() -> dict[str, Any]:
    pair = script(Pair(lower(Basic(1)), lower(Basic(2))))
    eager = Pair(lower(Basic(3)), lower(Basic(4)))
    return {"pair": pair, "eager": eager, "left": pair.left, "inside": eager.right}


def loaded_apart() -> dict[str, Any]:
    one, two = (loaded(saved(lower(Basic(weight)))) for weight in (1, 2))
    far, near = (loaded(saved(lower(called("Same", body)(), COMPILER))) for body in ("x + h", "x - h"))
    return {"one": one, "pair": script(Pair(one, two)), "two": two, "far": far, "near": near}


def two_backends() -> dict[str, Any]:
    return {"plain": lower(Basic(1)), "compiled": lower(Sum(), COMPILER), "again": lower(Basic(7), PLAIN)}


def beside_others() -> dict[str, Any]:
    eager = called("Eager", "x * h")()
    with lowering.quiet():
        exported = torch.export.export(Sum(), (X, H))
        traced = torch.jit.trace(Sum(), (X, H))
    return {
        "lowered": lower(Basic(1)),
        "exported": exported,
        "eager": eager,
        "scripted": script(Sum()),
        "traced": traced,
        "tensor": torch.arange(6.0),
    }


def own_state() -> dict[str, Any]:
    return {"three": script(Stateful(3.0)), "four": script(Stateful(4.0)), "lowered": lower(Basic(1))}


CASES = [
    two_different, one_name_two_codes, one_class_twice, one_class_sixteen_times, one_instance_twice, nested,
    loaded_apart, two_backends, beside_others, own_state,
]  # fmt: skip


def expected_of(modules: dict[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [value.detach() if isinstance(value, torch.Tensor) else value for value in _seen(module)]
        for name, module in modules.items()
    }


def there_and_back(cases: list[Callable[[], dict[str, Any]]], backend: str) -> None:
    def ranks(rank: int) -> None:
        lowering.load_backends()
        for make in cases:
            if rank == 0:
                modules = make()
                expected = expected_of(modules)
                objcomm.send_object((modules, expected), 1)
                check(objcomm.recv_object(1), expected)
            else:
                modules, expected = objcomm.recv_object(0)
                check(modules, expected)
                objcomm.send_object(modules, 0)

    run_ranks(ranks, backend=backend, timeout=150)


@pytest.mark.parametrize("make", CASES)
def test_there_and_back(make: Callable[[], dict[str, Any]]) -> None:
    there_and_back([make], "gloo")


def test_there_and_back_on_a_strict_backend() -> None:
    there_and_back(CASES, "strict")


@pytest.fixture(scope="module")
def backends() -> None:
    lowering.load_backends()


def test_what_was_one_is_one_and_what_was_two_is_two(backends: None) -> None:
    received = loopback(one_instance_twice())
    assert received["first"] is received["second"]
    assert received["parent"].left._c == received["parent"].right._c == received["first"]._c
    received = loopback(nested())
    assert received["pair"].left is received["left"]
    assert received["eager"].right is received["inside"]
    kinds = [str(lowering.inner(module)._type()) for module in loopback(one_class_sixteen_times()).values()]
    assert len(set(kinds)) == 16


def test_the_state_of_its_own_is_restored_once(backends: None) -> None:
    received = loopback(own_state())
    assert [received[name].restored for name in ("three", "four")] == [1, 1]
    assert loopback(received)["three"].restored == 2


# -- a codec that takes names for identity -----------------------------------------------------------------------------


def _name_of(module: Any) -> str:
    """The qualified name that the class had in Python."""
    return re.sub(r"___torch_mangle_\d+\.", "", module._c.qualified_name)


def by_name(modules: dict[str, Any]) -> dict[str, Any]:
    """What a codec does that thinks a qualified name says which module, or which class, is meant."""
    archives: dict[str, bytes] = {}
    for module in modules.values():
        archives.setdefault(_name_of(module), saved(module))
    unpacked = {name: loaded(data) for name, data in archives.items()}
    return {name: unpacked[_name_of(module)] for name, module in modules.items()}


@pytest.mark.parametrize(
    "make", [one_name_two_codes, one_class_twice, one_class_sixteen_times, loaded_apart, own_state]
)
def test_a_codec_by_name_would_be_found_out(make: Callable[[], dict[str, Any]], backends: None) -> None:
    modules = make()
    expected = expected_of(modules)
    with pytest.raises(AssertionError):
        check(by_name(modules), expected)
    check(loopback(modules), expected)


# -- the lite interpreter ----------------------------------------------------------------------------------------------


def lite(module: Any) -> Any:
    from torch.jit.mobile import _load_for_lite_interpreter

    with lowering.quiet():
        return _load_for_lite_interpreter(io.BytesIO(module._save_to_buffer_for_lite_interpreter()))


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_modules_of_the_lite_interpreter(backend: str) -> None:
    def ranks(rank: int) -> None:
        lowering.load_backends()
        if rank == 0:
            pair = script(Pair(lower(Basic(1)), lower(Basic(2))))
            several = [
                pair,
                lower(Sum(), COMPILER),
                script(called("Same", "x + h")()),
                script(called("Same", "x * h")()),
            ]
            modules = [lite(module) for module in several]
            expected = [module(X, H).detach() for module in several]
            assert_arrived([module(X, H).detach() for module in modules], expected)
            objcomm.send_object((modules, modules[0], expected), 1)
        else:
            modules, first, expected = objcomm.recv_object(0)
            assert first is modules[0]
            for received in (modules, loopback(modules)):
                assert_arrived([module(X, H).detach() for module in received], expected)
            assert modules[0].find_method("forward")
            assert not modules[0].find_method("backward")

    run_ranks(ranks, backend=backend)
