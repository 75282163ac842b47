"""Classes and functions by name: which code they are, so that a receiver with other code under that name can tell."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from ..errors import DecodeError
from . import classes, fingerprint
from .fingerprint import of as code_of
from .modulesource import module_name, qualname

__all__ = ["Version", "check", "code_of", "version"]


class Version(NamedTuple):
    """Which code a class or function is that travels by name, and where it is from."""

    code: str
    file: str = "of another file, or another version of it"


def version(obj: Any) -> Version | None:
    """The version of a class or function that is found under its name, or of a module, if it is the program's own."""
    code = code_of(obj)
    return Version(code, _file_of(obj)) if code else None


def _file_of(obj: Any) -> str:
    module = obj if isinstance(obj, types.ModuleType) else sys.modules[module_name(obj)]
    return str(getattr(module, "__file__", None) or "made without a file")


def check(found: Any, sent: Version) -> None:
    """Compare what was found by name with what was sent.

    Raises:
        DecodeError: it is other code.
    """
    is_module = isinstance(found, types.ModuleType)
    if not is_module and not classes.resolves(found):
        return
    here = version(found)
    if here is None or not fingerprint.differ(here.code, sent.code):
        return
    name = found.__name__ if is_module else f"{found.__module__}.{qualname(found)}"
    what = ", or what it derives from," if isinstance(found, type) and found.__bases__ != (object,) else ""
    raise DecodeError(
        f"{name}{what} is other code here ({here.file}) than at the sender ({sent.file})",
        hint="run the same code on both ranks, or let the sender call objcomm.register_generated for its module",
    )
