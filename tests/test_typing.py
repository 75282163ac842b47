"""What a type checker sees: the stub of the package is that of its functions, and says what each call returns.

``make types`` checks ``_what_is_seen``; it is never called.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import objcomm

if TYPE_CHECKING:
    from typing_extensions import assert_type

FOLDER = Path(objcomm.__file__).parent
STUB = ast.parse((FOLDER / "__init__.pyi").read_text())


class Config:
    width = 8


def _what_is_seen(rank: int, asynchronous: bool) -> None:
    config = objcomm.broadcast_object(Config() if rank == 0 else None, src=0)
    assert_type(config, Config)
    assert_type(objcomm.broadcast_object(Config(), src=0, async_op=True).wait(), Config)
    assert_type(objcomm.broadcast_object(None, src=0), Any)
    assert_type(objcomm.move_object(config if rank == 0 else None, 0, 1).width, int)
    assert_type(objcomm.move_object(config, 0, 1, async_op=True), objcomm.ObjectWork[Config])
    assert_type(objcomm.move_object(config, 0, 1, async_op=asynchronous), Config | objcomm.ObjectWork[Config])
    assert_type(objcomm.scatter_objects([torch.ones(1)] if rank == 0 else None, src=0), torch.Tensor)
    assert_type(objcomm.gather_objects(1, dst=0), list[Any] | None)
    assert_type(objcomm.all_gather_objects(1), list[Any])
    assert_type(objcomm.all_gather_objects(1, async_op=True).wait(), list[Any])
    assert_type(objcomm.all_to_all_objects([1, 2]), list[Any])
    assert_type(objcomm.isend_object(config, 1), objcomm.ObjectWork[Config])
    assert_type(objcomm.recv_object(0), Any)
    assert_type(objcomm.autograd.recv_object(0).obj, Any)


def _parameters(node: ast.FunctionDef) -> list[tuple[str, str, str | None]]:
    """Name, kind and default of each; ``async_op`` differs between overloads."""
    arguments = node.args
    defaults: list[ast.expr | None] = [*[None] * (len(arguments.args) - len(arguments.defaults)), *arguments.defaults]
    found = [
        (each.arg, "POSITIONAL_OR_KEYWORD", None if default is None else ast.unparse(default))
        for each, default in zip(arguments.args, defaults, strict=True)
    ]
    found += [
        (each.arg, "KEYWORD_ONLY", None if default is None else ast.unparse(default))
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [each for each in found if each[0] != "async_op"]


def test_overloads_are_those_of_the_functions() -> None:
    overloads = [node for node in STUB.body if isinstance(node, ast.FunctionDef)]
    for node in overloads:
        signature = inspect.signature(getattr(objcomm, node.name))
        expected = [
            (each.name, each.kind.name, None if each.default is each.empty else repr(each.default))
            for each in signature.parameters.values()
            if each.name != "async_op"
        ]
        assert _parameters(node) == expected, node.name
    # Every call that has it, and no other.
    public = [name for name in objcomm.__all__ if inspect.isfunction(getattr(objcomm, name))]
    asynchronous = {name for name in public if "async_op" in inspect.signature(getattr(objcomm, name)).parameters}
    assert {node.name for node in overloads} == asynchronous


def test_the_stub_has_every_name() -> None:
    names: set[str] = set()
    for node in STUB.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert ast.literal_eval(node.value) == objcomm.__all__
    assert names == set(objcomm.__all__)


def test_editors_are_told_that_there_are_types() -> None:
    assert (FOLDER / "py.typed").exists()
    for name in objcomm.__all__:
        thing = getattr(objcomm, name)
        if inspect.isfunction(thing):
            missing = [each for each in inspect.signature(thing).parameters.values() if each.annotation is each.empty]
            assert missing == [], name
