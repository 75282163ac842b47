"""What all kinds of tensors that travel as composites have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import registry
from .ordinary import Ordinary
from .tensors import dispatch_names


def kind(
    name: str,
    matches: Callable[[Any], bool],
    flatten: Callable[[Any], Sequence[Any]],
    rebuild: Callable[[list[Any]], Any],
    *,
    code: bool = False,
    base: type = torch.Tensor,
) -> None:
    """Register a kind of tensor. Whatever the caller has switched on, it is taken apart and built in a quiet thread."""

    def flatten_quietly(obj: Any) -> Sequence[Any]:
        with Ordinary():
            return flatten(obj)

    def rebuild_quietly(parts: list[Any]) -> Any:
        with Ordinary():
            return rebuild(parts)

    registry.register(f"tensor.{name}", matches, flatten_quietly, rebuild_quietly, code, base=base)


def answers_to(obj: Any, names: str) -> bool:
    """Whether this is a tensor of torch's own type, without attributes, that answers to one of the names."""
    if type(obj) is not torch.Tensor or obj.__dict__:
        return False
    return any(re.fullmatch(names, name) for name in dispatch_names(obj))


def requiring(tensor: Any, requires_grad: Any) -> Any:
    """The tensor, made to require grad if it did at the sender."""
    return tensor.requires_grad_() if boolean(requires_grad) else tensor


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} where True or False should be")
    return value


def tensor_part(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{type(value).__name__} where a tensor should be")
    return value
