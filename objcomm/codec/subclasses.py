"""Subclasses of tensors that a user or a library defines, and the tensors that cannot be sent at all.

A subclass travels as a reference to its class and, in this order of preference, what its ``__tensor_flatten__`` says,
what its own ``__reduce_ex__`` says, or its memory and attributes. Building it runs code of the class, so restricted
trust refuses it.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from ..errors import EncodeError
from .composites import Kind, tensor_part
from .tensors import dispatch_names, is_memory, memory_of

_BASES = (torch.Tensor, torch.nn.Parameter)
_PYTHON = frozenset(("Python", "PythonTLSSnapshot"))

# Subclasses that only mean something in the place where they are.
_REFUSED = {
    "DTensor": ("it is this rank's share of a distributed tensor", "send its to_local() or its full_tensor()"),
    "AsyncCollectiveTensor": ("its collective is still running", "send its wait()"),
    "FakeTensor": ("it has no data", "send the real tensor, outside of the trace"),
    "FunctionalTensor": ("it belongs to a trace", "send the real tensor, outside of the trace"),
    "ProxyTensor": ("it belongs to a trace", "send the real tensor, outside of the trace"),
}


# -- subclasses --------------------------------------------------------------------------------------------------------


def _is_subclass(obj: Any) -> bool:
    cls = type(obj)
    return cls not in _BASES and not any(base.__name__ in _REFUSED and _is_torchs(base) for base in cls.__mro__)


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _is_wrapper(obj: Any) -> bool:
    cls = type(obj)
    return _is_subclass(obj) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def _wrapped(obj: Any) -> list[Any]:
    names, context = obj.__tensor_flatten__()
    known = set(names)
    more = {name: value for name, value in obj.__dict__.items() if name not in known}
    inner = {name: getattr(obj, name) for name in names}
    return [type(obj), inner, context, obj.size(), obj.stride(), obj.requires_grad, more]


def _from_wrapped(parts: list[Any]) -> Any:
    cls, inner, context, size, stride, requires_grad, more = parts
    obj = cls.__tensor_unflatten__(inner, context, size, stride)
    for name, value in more.items():
        obj.__dict__.setdefault(name, value)
    return obj if obj.requires_grad == requires_grad else obj.requires_grad_(requires_grad)


def _reduces_itself(obj: Any) -> bool:
    cls: Any = type(obj)
    own = (cls.__reduce_ex__, cls.__reduce__) != (torch.Tensor.__reduce_ex__, torch.Tensor.__reduce__)
    return _is_subclass(obj) and own


def _reduced(obj: Any) -> list[Any]:
    reduced = obj.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or any(item is not None for item in reduced[3:]):
        raise EncodeError(f"{type(obj).__qualname__} reduces itself to something that cannot be sent")
    return list(reduced)


def _from_reduced(parts: list[Any]) -> Any:
    make, arguments, *state = parts
    obj = make(*arguments)
    if state and state[0] is not None:
        _set_state(obj, state[0])
    return obj


def _has_memory(obj: Any) -> bool:
    others = [name for name in dispatch_names(obj) if name not in _PYTHON]
    if not _is_subclass(obj) or len(others) != 1 or not is_memory(others[0]):
        return False
    try:
        return bool(obj.untyped_storage().data_ptr()) or obj.numel() == 0
    except RuntimeError:
        return False


def _is_dressed(obj: Any) -> bool:
    """Something else than plain memory, but torch's own, in the dress of a subclass."""
    return _is_subclass(obj) and _PYTHON.isdisjoint(dispatch_names(obj))


def _with_memory(obj: Any) -> list[Any]:
    return [type(obj), memory_of(obj), obj.requires_grad, _state(obj)]


def _undressed(obj: Any) -> list[Any]:
    return [type(obj), obj.as_subclass(torch.Tensor).detach(), obj.requires_grad, _state(obj)]


def _from_memory(parts: list[Any]) -> Any:
    cls, memory, requires_grad, state = parts
    make: Any = torch.Tensor._make_subclass
    obj = make(cls, tensor_part(memory), requires_grad)
    _set_state(obj, state)
    return obj


def _state(obj: Any) -> Any:
    slots = {name: getattr(obj, name) for name in _slot_names(type(obj)) if hasattr(obj, name)}
    return (dict(obj.__dict__), slots) if slots else dict(obj.__dict__)


def _slot_names(cls: type) -> list[str]:
    names: Any = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    return list(names)


def _set_state(obj: Any, state: Any) -> None:
    if type(obj).__setstate__ is not torch.Tensor.__setstate__:
        obj.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    obj.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(obj, name, value)


# -- refused -----------------------------------------------------------------------------------------------------------


def _refuse(obj: Any) -> list[Any]:
    cls = type(obj)
    for base in cls.__mro__:
        if base.__name__ in _REFUSED and _is_torchs(base):
            why, instead = _REFUSED[base.__name__]
            raise EncodeError(f"a {cls.__name__} cannot be sent: {why}", hint=instead)
    names = dispatch_names(obj)
    if any(name.startswith("FuncTorch") for name in names):
        why, instead = "it belongs to a transform of torch.func", "send it outside of vmap, grad and the like"
    elif "Functionalize" in names:
        why, instead = _REFUSED["FunctionalTensor"]
    elif "Named" in names:
        why, instead = "its dimensions have names", "send tensor.rename(None) and the names"
    elif not _PYTHON.isdisjoint(names):
        why, instead = (
            "there is no memory behind it, and its class does not say what it consists of",
            "define __tensor_flatten__ and __tensor_unflatten__ on the class, or send its parts",
        )
    else:
        why, instead = f"the memory of a {obj.device.type} tensor cannot be reached", "send tensor.cpu()"
    raise EncodeError(f"a {cls.__name__} of {obj.dtype} cannot be sent: {why}", hint=instead)


def _never(parts: list[Any]) -> Any:
    raise ValueError("no tensor travels as this")


KINDS = (
    Kind("refused", lambda obj: True, _refuse, _never),
    Kind("dressed", _is_dressed, _undressed, _from_memory, code=True),
    Kind("memory", _has_memory, _with_memory, _from_memory, code=True),
    Kind("reduced", _reduces_itself, _reduced, _from_reduced, code=True),
    Kind("wrapper", _is_wrapper, _wrapped, _from_wrapped, code=True),
)
