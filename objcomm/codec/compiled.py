"""What torch.compile returns: a module travels as the one that was given to it."""

from __future__ import annotations

import types
from typing import Any

import torch

from ..errors import EncodeError
from . import registry


def has_base(obj: Any, module: str, name: str) -> bool:
    """Whether the type of an object derives from a class of that name, whose module may be expensive to import."""
    return any(base.__module__ == module and base.__qualname__ == name for base in type(obj).__mro__)


def _is_compiled(obj: Any) -> bool:
    return has_base(obj, "torch._dynamo.eval_frame", "OptimizedModule")


def _original(parts: list[Any]) -> Any:
    (module,) = parts
    return module


def refuse_function(obj: types.FunctionType) -> None:
    """Refuse a function that torch.compile has made.

    Raises:
        EncodeError: it is one.
    """
    if "_torchdynamo_orig_callable" in vars(obj):
        raise EncodeError(
            f"the function {obj.__qualname__} is compiled, and what it was compiled to cannot be sent",
            hint="send the function that was given to torch.compile, and compile it on the receiver",
        )


registry.register("module.compiled", _is_compiled, lambda obj: [obj._orig_mod], _original, base=torch.nn.Module)
