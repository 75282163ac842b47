"""TorchScript functions in the archive of a message: torch keeps them if a method calls them."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..errors import DecodeError, EncodeError

_C: Any = torch._C

_CALL = "call_{}"
_FUNCTION = "function_{}"
# A type of this form is torch's own; the name of any other type means something in its own compilation unit only.
_FOREIGN = re.compile(r"\b__torch__\b(?!\.torch\.classes\.)")
_KEPT = ("__doc__", "__name__", "__qualname__")


def check(function: Any) -> None:
    """Refuse a function that cannot be saved as a function.

    Raises:
        EncodeError: it can only be sent as a method of a module.
    """
    types = [argument.type.annotation_str for argument in (*function.schema.arguments, *function.schema.returns)]
    named = function.qualified_name.startswith("__torch__.")
    if not named or any(_FOREIGN.search(each) for each in types):
        why = "classes of TorchScript are among its arguments" if named else "it was not made by torch.jit.script"
        raise EncodeError(
            f"the TorchScript function {function.name} cannot be sent by itself: {why}",
            hint="send a scripted module with a method that calls it",
        )


def attributes(function: Any) -> dict[str, Any]:
    """What the Python object of a function has beside the function."""
    return {name: value for name, value in vars(function).items() if name in _KEPT and isinstance(value, str)}


def refer(container: Any, functions: list[Any]) -> None:
    """Give a module a method for each function that calls it."""
    names = {_FUNCTION.format(number): function for number, function in enumerate(functions)}
    concrete = _C.ConcreteModuleType.from_jit_type(container._type())
    for number, function in enumerate(functions):
        arguments = [f"a{at}" for at in range(len(function.schema.arguments))]
        typed = [
            f"{name}: {argument.type.annotation_str}"
            for name, argument in zip(arguments, function.schema.arguments, strict=True)
        ]
        (result,) = function.schema.returns
        source = (
            f"def {_CALL.format(number)}(self, {', '.join(typed)}) -> {result.type.annotation_str}:\n"
            f"    return {_FUNCTION.format(number)}({', '.join(arguments)})\n"
        )
        container._define(concrete, source, names.get)


def find(unit: Any, container: Any, number: int) -> Any:
    """The function that the method of that number calls, in the compilation unit that it was loaded into."""
    graph = container._get_method(_CALL.format(number)).graph
    for node in graph.nodes():
        if node.kind() == "prim::Constant" and node.output().type().kind() == "FunctionType":
            function = unit.find_function(node.output().type().annotation_str)
            if function is not None:
                return function
    raise DecodeError(f"the TorchScript archive has no function {number}")
