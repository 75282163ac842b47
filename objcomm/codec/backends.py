"""Backends that modules are lowered to: whether this process has them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DecodeError

NAMESPACE = "__backends__"


def is_known(namespace: str, name: str) -> bool:
    """Whether a class of C++ is registered here."""
    try:
        return getattr(getattr(torch.classes, namespace), name) is not None
    except RuntimeError:
        return False


def require(backend: str) -> None:
    """Make sure of a backend before anything that was lowered to it is loaded.

    Raises:
        DecodeError: it is not here, or says that it is not available.
    """
    if not is_known(NAMESPACE, backend):
        raise DecodeError(
            f"a module was lowered to the backend {backend!r}, which is not known here",
            hint="load the library that registers it, with torch.classes.load_library, before receiving",
        )
    made: Any = getattr(getattr(torch.classes, NAMESPACE), backend)
    try:
        available = bool(made().is_available())
    except RuntimeError:
        return  # it cannot say; loading the module will
    if not available:
        raise DecodeError(f"a module was lowered to the backend {backend!r}, which is not available here")
