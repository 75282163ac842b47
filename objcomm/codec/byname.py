"""What a pickle holds by its name: classes, functions, modules, and objects that are pickled as a name.

The name alone is not enough: what is generated goes by its source, and of all else the receiver compares the code.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import pickle
import sys
import types
from typing import Any

import cloudpickle
import torch

from ..errors import DecodeError
from . import units, versions
from .classes import resolves

_copyreg: Any = copyreg
_Module: Any = torch.nn.Module
_GETSTATE = vars(_Module).get("__getstate__", ...)


def reduce(obj: Any) -> Any:
    """How a class or function is pickled that need not go by value, or None. A string means: by its name alone.

    cloudpickle would send what ``__main__`` defines by value.
    """
    module = obj.__module__
    if module in cloudpickle.list_registry_pickle_by_value():
        return None
    found = units.reduce(obj)
    if found is not None or not resolves(obj):
        return found
    version = versions.version(obj)
    return obj.__qualname__ if version is None else (_referred, (module, obj.__qualname__, *version))


def reduce_module(obj: types.ModuleType) -> Any:
    """How a module is pickled whose name is not enough, or None."""
    if obj.__name__ in cloudpickle.list_registry_pickle_by_value():
        return None
    found = units.reduce_module(obj)
    if found is not None or sys.modules.get(obj.__name__) is not obj:
        return found
    version = versions.version(obj)
    return None if version is None else (_referred, (obj.__name__, "", *version))


def reduce_itself(obj: Any) -> Any:
    """How an object is pickled that has a say in it, as far as more is needed than what it says."""
    kind: Any = type(obj)
    if kind is functools.cached_property:  # up to Python 3.11 there is a lock in it
        return _cached_property, (obj.func, obj.attrname)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        if not issubclass(kind, torch.nn.Module):
            return NotImplemented
        slots = _slots(obj) if getattr(kind, "__getstate__", None) is _GETSTATE else {}
        if slots:
            return _new_module, (kind,), (obj.__getstate__(), slots), None, None, _set_slotted
        if kind.__setstate__ is _Module.__setstate__:
            return NotImplemented
    reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(reduced, str):
        return _named(obj, reduced)
    if issubclass(kind, torch.nn.Module) and isinstance(reduced, tuple) and reduced[0] is _copyreg.__newobj__:
        return (_new_module, *reduced[1:])
    return reduced


def _slots(obj: torch.nn.Module) -> dict[str, Any]:
    """The values in slots of a module; torch's own ``__getstate__`` leaves them out."""
    found = {}
    for name in _copyreg._slotnames(type(obj)):
        with contextlib.suppress(AttributeError):
            found[name] = object.__getattribute__(obj, name)
    return found


def _set_slotted(module: torch.nn.Module, states: tuple[Any, dict[str, Any]]) -> None:
    state, slots = states
    set_state: Any = module.__setstate__
    set_state(state)
    for name, value in slots.items():
        object.__setattr__(module, name, value)


def _cached_property(function: Any, name: str | None) -> Any:
    made: Any = functools.cached_property(function)
    made.attrname = name
    return made


def _new_module(cls: Any, *arguments: Any) -> Any:
    """A module before it gets its state: its own ``__setstate__`` may know its own part alone, as quantized ones do."""
    module = cls.__new__(cls, *arguments)
    torch.nn.Module.__init__(module)
    return module


def _named(obj: Any, name: str) -> Any:
    """How an object is pickled that is what a module holds under a name, such as a function with a cache around it."""
    module = sys.modules.get(pickle.whichmodule(obj, name))  # type: ignore[attr-defined]
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return name
    if not _holds(module, name, obj):
        # Another one has its name now. The name alone is what the pickler refuses, if there is nothing else.
        within = getattr(obj, "__wrapped__", None)
        placed = units.reduce_at(within.__globals__, name, obj) if isinstance(within, types.FunctionType) else None
        return placed or (_cached_anew(obj) if isinstance(obj, functools._lru_cache_wrapper) else name)
    within = units.reduce_inside(module, name)
    if within is not None:
        return within
    version = versions.version(module)
    return name if version is None else (_member, (module.__name__, name, *version))


def _cached_anew(obj: Any) -> Any:
    """How a function under ``functools.lru_cache`` is pickled that goes by value: its cache is empty then."""
    parameters = obj.cache_parameters()
    return _cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"])


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _holds(module: types.ModuleType, name: str, obj: Any) -> bool:
    """Whether a module has this very object under that name."""
    try:
        return functools.reduce(getattr, name.split("."), module) is obj
    except AttributeError:
        return False


def _member(module: str, name: str, code: str, file: str) -> Any:
    """What a module has, whose code has to be the sender's."""
    found = find(module, name)
    versions.check(sys.modules[module], versions.Version(code, file))
    return found


def find(module: str, qualname: str) -> Any:
    """What a module has under a qualified name.

    Raises:
        DecodeError: there is no such thing.
    """
    if module == "__mp_main__" and module not in sys.modules:
        module = "__main__"
    try:
        __import__(module)
        found: Any = sys.modules[module]
        for name in qualname.split(".") if qualname else ():
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise DecodeError(
            f"{module}.{qualname}, which the sender refers to, is not known here: {error}",
            hint="define it on this rank too, under that name, in a module that can be imported; if its module is "
            "generated, let the sender call objcomm.register_generated for it",
        ) from error
    return found


def _referred(module: str, qualname: str, code: str, file: str) -> Any:
    """A class or function by its name, or a module, whose code has to be the sender's."""
    found = find(module, qualname)
    if isinstance(found, (type, types.FunctionType, types.ModuleType)):
        versions.check(found, versions.Version(code, file))
    return found
