"""Classes and functions by name: which code they are, so that a receiver with other code under that name can tell."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from ..errors import DecodeError
from . import classes, modulesource
from .modulesource import module_name, qualname


class Version(NamedTuple):
    """Which code a class or function is that travels by name, and where it is from."""

    code: str
    file: str = "of another file, or another version of it"


def version(obj: Any) -> Version | None:
    """The version of a class or function that is found under its name, or of a module, if it is the program's own."""
    namespace = vars(obj if isinstance(obj, types.ModuleType) else sys.modules[module_name(obj)])
    code = modulesource.version_of(namespace)
    return Version(code, str(namespace.get("__file__"))) if code else None


def check(found: Any, sent: Version) -> None:
    """Compare what was found by name with what was sent.

    Raises:
        DecodeError: it is other code.
    """
    is_module = isinstance(found, types.ModuleType)
    here = version(found) if is_module or classes.resolves(found) else None
    if here is None or here.code == sent.code or here.code.partition(":")[0] != sent.code.partition(":")[0]:
        return
    name = found.__name__ if is_module else f"{found.__module__}.{qualname(found)}"
    raise DecodeError(
        f"{name} is other code here ({here.file}) than at the sender ({sent.file})",
        hint="run the same code on both ranks, or let the sender call objcomm.register_generated for its module",
    )
