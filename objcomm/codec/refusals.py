"""What is a module, or like one, but cannot be sent, with what to send instead."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parametrize

from ..errors import EncodeError
from . import registry
from .compiled import has_base

_C: Any = torch._C


def _never(parts: list[Any]) -> Any:
    raise ValueError("nothing travels as this")


def _refuse_bare(obj: Any) -> list[Any]:
    raise EncodeError(
        f"a bare script object ({obj._type().qualified_name()}) cannot be sent: it would abort the receiver",
        hint="send the torch.jit.ScriptModule around it, such as torch.jit.load returns",
    )


def _refuse_method(obj: Any) -> list[Any]:
    raise EncodeError(f"the method {obj.name} of a script module cannot be sent", hint="send the module")


def _is_unlifted(obj: Any) -> bool:
    return has_base(obj, "torch.export._unlift", "_StatefulGraphModule")


def _refuse_unlifted(obj: Any) -> list[Any]:
    raise EncodeError(
        "ExportedProgram.module() cannot be sent", hint="send the ExportedProgram, and call module() on the receiver"
    )


def _is_unflattened(obj: Any) -> bool:
    return has_base(obj, "torch.export.unflatten", "_SubmoduleBase")


def _refuse_unflattened(obj: Any) -> list[Any]:
    raise EncodeError(
        f"the {type(obj).__name__} of torch.export.unflatten cannot be sent",
        hint="send the ExportedProgram, and unflatten it on the receiver",
    )


def _refuse_parametrized(obj: Any) -> list[Any]:
    raise EncodeError(
        "a parametrized module cannot be sent: its class was made for it alone",
        hint="send its state_dict(), or remove the parametrizations first with parametrize.remove_parametrizations",
    )


def _is_executorch(obj: Any) -> bool:
    return any(
        base.__module__.partition(".")[0] == "executorch" and "lowered" in base.__name__.lower()
        for base in type(obj).__mro__
    )


def _refuse_executorch(obj: Any) -> list[Any]:
    raise EncodeError(
        f"a {type(obj).__name__} of ExecuTorch cannot be sent", hint="send its buffer: module.buffer() are bytes"
    )


# torch binds values of TorchScript that are no modules to the same class as objects of C++, which can be pickled.
def _is_bare(obj: Any) -> bool:
    return isinstance(obj, _C.ScriptModule) or not obj._type().qualified_name().startswith("__torch__.torch.classes.")


for _name, _matches, _refuse, _base in (
    ("script object", _is_bare, _refuse_bare, _C.ScriptObject),
    ("script method", lambda obj: True, _refuse_method, _C.ScriptMethod),
    ("exported module", _is_unlifted, _refuse_unlifted, torch.nn.Module),
    ("unflattened module", _is_unflattened, _refuse_unflattened, torch.nn.Module),
    ("parametrized module", parametrize.is_parametrized, _refuse_parametrized, torch.nn.Module),
    ("ExecuTorch module", _is_executorch, _refuse_executorch, torch.nn.Module),
):
    registry.register(f"refused.{_name}", _matches, _refuse, _never, base=_base)
