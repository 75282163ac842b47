"""Installing, uninstalling, and saying which it is."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import loading
from .anchors import TESTED_VERSIONS, anchors_of, differences
from .patching import Patch, Patches


@dataclass(frozen=True)
class Status:
    """What :func:`status` tells.

    Attributes:
        installed: the integration is in place.
        object_outputs: a pipeline may return objects.
        nnscaler: the version of nnScaler, or ``None`` where it cannot be imported.
        location: where nnScaler was found.
        torch: the version of torch.
        anchors: how many places of nnScaler the integration relies on.
        differences: which of them are not as tested or, while installed, not the integration's own any more.
        compat: the repairs for 0.8 on a newer torch are in place.
        reason: why :func:`install` would refuse, or ``None``.
    """

    installed: bool
    object_outputs: bool
    nnscaler: str | None
    location: str | None
    torch: str
    anchors: int
    differences: tuple[str, ...]
    compat: bool
    reason: str | None

    def __str__(self) -> str:
        checked = f"{self.anchors - len(self.differences)} of {self.anchors} as tested"
        lines = [
            f"nnScaler        {self.nnscaler or 'not found'}" + (f" ({self.location})" if self.location else ""),
            f"torch           {self.torch}",
            f"tested with     nnScaler {', '.join(TESTED_VERSIONS)}",
            f"anchors         {checked if self.nnscaler else f'{self.anchors}, not checked without nnScaler'}",
            *(f"                {text}" for text in self.differences),
            f"installed       {'yes' if self.installed else 'no'}",
            f"object outputs  {'allowed' if self.object_outputs else 'as nnScaler decides'}",
            f"0.8 on torch>2.6 repairs {'in place' if self.compat else 'not in place'}",
        ]
        if self.reason:
            lines.append(f"cannot install  {self.reason}")
        return "\n".join(lines)


@dataclass
class _State:
    patches: Patches = field(default_factory=Patches)
    outputs: Patches = field(default_factory=Patches)
    undo: list[Callable[[], None]] = field(default_factory=list)
    installed: bool = False
    object_outputs: bool = False
    compat: bool = False


_state = _State()


def install(object_outputs: bool = False) -> None:
    """Make nnScaler's code generator move objects. Calling it again only changes ``object_outputs``.

    nnScaler is imported if it is installed, or from the checkout that the environment variable ``NNSCALER_HOME`` names.

    Args:
        object_outputs: allow a pipeline with a schedule to return objects, which 0.8 refuses.

    Raises:
        RuntimeError: nnScaler is not there, its version was not tested, or a place that the integration relies on is
            not as it was tested; the message names it. Nothing is changed then.
    """
    if not _state.installed:
        nnscaler = find_nnscaler()
        if isinstance(nnscaler, str):
            raise RuntimeError(nnscaler)
        version = str(nnscaler.__version__)
        reason = _refusal(version)
        if reason:
            raise RuntimeError(reason)
        _install(version)
    if object_outputs != _state.object_outputs:
        _set_object_outputs(object_outputs)


def uninstall() -> None:
    """Put nnScaler back as it was. Code that was generated keeps working: it imports objcomm alone."""
    if _state.object_outputs:
        _set_object_outputs(False)
    _state.patches.revert()
    while _state.undo:
        _state.undo.pop()()
    _state.installed = _state.compat = False


def status() -> Status:
    """Versions, anchors and state. Changes nothing, but imports nnScaler where it can be found."""
    import torch

    nnscaler = find_nnscaler()
    version = location = None
    differing: list[str] = []
    if isinstance(nnscaler, str):
        reason: str | None = nnscaler
    else:
        version, location = str(nnscaler.__version__), os.path.dirname(str(nnscaler.__file__))
        # While installed, the anchors are the integration's own wrappers.
        differing = _state.patches.overridden() if _state.installed else differences(version)
        reason = None if _state.installed else _refusal(version)
    return Status(
        installed=_state.installed,
        object_outputs=_state.object_outputs,
        nnscaler=version,
        location=location,
        torch=str(torch.__version__),
        anchors=len(anchors_of(version or TESTED_VERSIONS[-1])),
        differences=tuple(differing),
        compat=_state.compat,
        reason=reason,
    )


def find_nnscaler() -> Any | str:
    """The module, imported from where it is installed or from ``NNSCALER_HOME``; or why there is none."""
    home = os.environ.get("NNSCALER_HOME")
    if home and os.path.isdir(os.path.join(home, "nnscaler")) and home not in sys.path:
        # Last, so that an installed one wins, and the checkout's own "tests" and "examples" hide nobody's.
        sys.path.append(home)
    try:
        return importlib.import_module("nnscaler")
    except ImportError as error:
        if (error.name or "").split(".")[0] != "nnscaler":
            return f"nnScaler cannot be imported, because the module {error.name!r} is missing"
        where = f"{home} (NNSCALER_HOME) holds none" if home else "NNSCALER_HOME, a checkout of it, is not set"
        return f"nnScaler is missing: it is not installed, and {where}"


def _refusal(version: str) -> str | None:
    different = differences(version)
    if version not in TESTED_VERSIONS:
        detail = "; ".join(different) or "every anchor has the tested signature, but what is behind them is not known"
        return f"nnScaler {version} was not tested, only {', '.join(TESTED_VERSIONS)}: {detail}"
    if different:
        return f"this nnScaler {version} is not the one that was tested: {'; '.join(different)}"
    return None


def _install(version: str) -> None:
    # These import nnScaler: nothing else in this package may before it was found.
    from . import adapters, codegen, collisions, compat, reuse, schedule

    todo: list[Patch] = []
    for part in (adapters, schedule, codegen, reuse, collisions):
        todo += part.patches(version)
    repair = compat.needed(version)
    if repair:
        todo += compat.patches()
    _state.patches.apply(todo)
    if repair:
        _state.undo.append(compat.drop_pybind_leaves())
    finder = loading.Finder()
    sys.meta_path.insert(0, finder)
    _state.undo.append(lambda: sys.meta_path.remove(finder))
    _state.compat = repair
    _state.installed = True


def _set_object_outputs(allowed: bool) -> None:
    if allowed:
        parallel = importlib.import_module("nnscaler.parallel")
        _state.outputs.apply([Patch(parallel, "_contains_uncommutable_data", lambda _: lambda ir_outputs: False)])
    else:
        _state.outputs.revert()
    _state.object_outputs = allowed
