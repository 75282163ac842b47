"""Modules of the lite interpreter: as the flatbuffer that torch makes of them.

Each is a message of its own within the message: torch has no archive for several of them, and what it says about one
are the names of the functions inside.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.jit.mobile import LiteScriptModule

from ..errors import DecodeError, EncodeError
from . import registry
from .backends import require
from .path import reason

_C: Any = torch._C

_LOWERED = re.compile(r"torch\.jit\.LoweredModule\.(\w+)\..*")


def _flatten(obj: Any) -> list[Any]:
    try:
        data = _C._save_mobile_module_to_bytes(obj._c, {})
        return [data, sorted(_check(data))]
    except RuntimeError as error:
        raise EncodeError(
            f"torch cannot save this module of the lite interpreter: {reason(error)}",
            hint="send the TorchScript module that it was made of",
        ) from error


def _check(data: bytes) -> set[str]:
    """The backends that a flatbuffer needs.

    Raises:
        DecodeError: it has lost a ``__setstate__``.
    """
    names = set(_C._get_module_info_from_flatbuffer(data)["function_names"])
    for name in names:
        prefix, _, method = name.rpartition(".")
        if method == "__getstate__" and f"{prefix}.__setstate__" not in names:
            raise DecodeError(f"the module of the lite interpreter has no __setstate__ for {prefix}")
    return {found[1] for found in map(_LOWERED.fullmatch, names) if found is not None}


def _rebuild(parts: list[Any]) -> Any:
    data, backends = parts
    for backend in backends:
        require(backend)
    try:
        _check(data)
        return LiteScriptModule(_C._load_mobile_module_from_bytes(data))
    except DecodeError:
        raise
    except RuntimeError as error:
        raise DecodeError(f"a module of the lite interpreter cannot be loaded here: {reason(error)}") from error


registry.register("script.lite", lambda obj: True, _flatten, _rebuild, code=True, base=LiteScriptModule)
