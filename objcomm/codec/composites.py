"""What all kinds of tensors that travel as composites have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import registry
from .ordinary import Ordinary
from .tensors import dispatch_names, is_plain


class Kind(NamedTuple):
    """A kind of tensor; the fields are those of ``registry.register``, the name without its prefix."""

    name: str
    matches: Callable[[Any], bool]
    flatten: Callable[[Any], Sequence[Any]]
    rebuild: Callable[[list[Any]], Any]
    code: bool = False
    base: type = torch.Tensor


def register(kind: Kind) -> None:
    """Register a kind. Whatever the caller has switched on, it is taken apart and built in a quiet thread."""

    def flatten(obj: Any) -> Sequence[Any]:
        with Ordinary():
            return kind.flatten(obj)

    def rebuild(parts: list[Any]) -> Any:
        with Ordinary():
            return kind.rebuild(parts)

    registry.register(f"tensor.{kind.name}", kind.matches, flatten, rebuild, kind.code, base=kind.base)


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
        raise ValueError(f"{type(value).__name__} where True or False should be")
    return value


def tensor_part(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{type(value).__name__} where a tensor should be")
    return value


def plain_part(value: Any) -> Any:
    """A part that is strided memory and nothing else: then its methods say what they say, whoever sent it."""
    if not is_plain(tensor_part(value)):
        raise ValueError("a tensor of another kind where a plain one should be")
    return value


def sizes_part(value: Any) -> list[int]:
    """A part that is the shape or the strides of a tensor."""
    if type(value) is not list or len(value) > 256 or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("something else where the sizes of a tensor should be")
    return value
