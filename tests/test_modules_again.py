"""Modules, and code of generated ones, that are easily taken for others: by a name, by a file, by what Python adds."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import objcomm
from objcomm.codec import encode
from objcomm.errors import DecodeError, EncodeError, UsageError
from tests import lowering
from tests.loopback import arrive, loopback
from tests.lowering import Basic, Pair, lower, script
from tests.ranks import run_ranks
from tests.test_modules_generated import NAME, clean, load, write

__all__ = ["clean"]

SOURCE = """
import contextlib
import functools

SCALE = {scale}

@functools.lru_cache(None)
def cached(x):
    return x * SCALE

class Model:
    level = {scale}

    @staticmethod
    def fixed(x):
        return x + SCALE

    @functools.cached_property
    def kept(self):
        return SCALE

    @functools.lru_cache(None)
    def slow(self):
        return SCALE

def used(x):
    return x - SCALE
"""


def source(scale: int) -> str:
    return SOURCE.format(scale=scale)


# -- generated code ----------------------------------------------------------------------------------------------------


def makers() -> Iterator[Any]:
    yield lambda module: module.cached
    yield lambda module: module.Model.fixed
    yield lambda module: module.used
    yield lambda module: functools.partial(module.cached, 5)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_functions_of_two_modules_of_one_name(backend: str, tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            first = load(write(tmp_path / "first", source(2)))
            firsts = [make(first) for make in makers()]
            second = load(write(tmp_path / "second", source(30)))
            functions = [*firsts, *(make(second) for make in makers())]
            objcomm.send_object(functions, 1)
            sent = [each() if isinstance(each, functools.partial) else each(5) for each in functions]
            assert sent == objcomm.recv_object(1) == [10, 7, 3, 10, 150, 35, -25, 150]
        else:
            load(write(tmp_path / "other", source(400)))
            functions = objcomm.recv_object(0)
            assert type(functions[0]) is functools._lru_cache_wrapper
            got = [each() if isinstance(each, functools.partial) else each(5) for each in functions]
            objcomm.send_object(got, 0)

    run_ranks(ranks, backend=backend)


class Named:
    """Is pickled as a name."""

    def __reduce__(self) -> str:
        return "cached"


def test_what_goes_by_a_name_that_is_another_ones_is_not_taken_for_it(tmp_path: Path) -> None:
    module = load(write(tmp_path, source(2)))
    old = module.cached
    module.cached = functools.lru_cache(None)(lambda x: -1)
    received = loopback(old)
    assert received(5) == old(5) == 10
    assert received.cache_parameters() == old.cache_parameters()
    named = Named()
    named.__module__ = module.__name__
    with pytest.raises(EncodeError, match="not the same object"):
        encode(named)
    assert loopback(module.Model.slow) is module.Model.slow


def test_a_file_that_was_written_before_the_module_was_registered(tmp_path: Path) -> None:
    path = write(tmp_path, source(2))
    module = load(path)
    path.write_text(source(3))
    objcomm.register_generated(module)
    with pytest.raises(EncodeError, match="not known any more"):
        encode(module.Model())
    path.write_text(source(2))
    importlib.invalidate_caches()
    objcomm.register_generated(module)
    path.write_text(source(3))
    del module.Model.fixed  # what is remembered is not looked for again
    assert arrive(encode(module.Model())).level == 2


def test_a_module_registers_itself_and_counts(tmp_path: Path) -> None:
    text = f"import objcomm\ncount = 0\nobjcomm.register_generated(__name__)\ncount += 1\ncount += 1\n{source(7)}"
    module = load(write(tmp_path, text))
    objcomm.register_generated(module)
    (tmp_path / f"{NAME}.py").unlink()
    assert loopback(module.Model()).level == 7


def test_a_source_that_is_none(tmp_path: Path) -> None:
    module = load(write(tmp_path, source(2)))
    with pytest.raises(UsageError, match="none of Python"):
        objcomm.register_generated(module, source="def (")


def test_the_advice_where_a_module_is_not_known(tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            module = load(write(tmp_path, source(2)))
            module.SCALE = 5  # now nobody knows what it was made from
            objcomm.send_object(module.Model(), 1)
        else:
            with pytest.raises(DecodeError, match="register_generated"):
                objcomm.recv_object(0)

    run_ranks(ranks)


# -- modules -----------------------------------------------------------------------------------------------------------


class Slotted(torch.nn.Module):
    __slots__ = ("extra", "unset")

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        object.__setattr__(self, "extra", [self, self.linear.weight])


class Scaled(Slotted):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.restored = True


@pytest.mark.parametrize("kind", [Slotted, Scaled])
def test_slots_of_modules(kind: Any) -> None:
    received: Any = loopback(kind())
    assert received.extra[0] is received
    assert received.extra[1] is received.linear.weight
    assert not hasattr(received, "unset")
    assert hasattr(received, "restored") == (kind is Scaled)


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_one_submodule_in_several_places_is_one_python_object(backend: str) -> None:
    def ranks(rank: int) -> None:
        lowering.load_backends()
        if rank == 0:
            module = lower(Basic(1))
            twice, other = script(Pair(module, module)), script(Pair(lower(Basic(2)), module))
            assert twice.left is twice.right is other.right
            objcomm.send_object([twice, other], 1)
            objcomm.send_object([other, module, twice], 1)
        else:
            twice, other = objcomm.recv_object(0)
            assert twice.left is twice.right is other.right is not other.left
            assert len(list(twice.modules())) == 3  # itself, the one submodule, and what that was lowered to
            other, module, again = loopback(objcomm.recv_object(0))
            assert again.left is again.right is other.right is module
            x, h = torch.tensor([5.0]), torch.tensor([2.0])
            assert [each(x, h).item() for each in (twice, again, other)] == [24.0, 24.0, 24.0]

    run_ranks(ranks, backend=backend, timeout=150)


def test_two_python_objects_of_one_submodule_stay_two() -> None:
    loaded = lowering.loaded(lowering.saved(script(Pair(*[script(Basic(1))] * 2))))
    assert loaded.left is not loaded.right
    assert loaded.left._c == loaded.right._c
    loaded.left.note = "left"
    received = loopback(loaded)
    assert received.left is not received.right
    assert received.left._c == received.right._c
    assert received.left.note == "left"
    assert "note" not in vars(received.right)
