"""Putting the calls in torch.distributed's place, and taking them out again.

torch's functions stay the objects that they are: each is a wrapper that logs what its function raises, and that
function is replaced inside of the wrapper. So whoever has got hold of one, by ``from torch.distributed import
gather_object`` in a module that was imported long ago, in a class, a default argument or a partial, calls what is
installed; there is no list of places that could miss one.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import UsageError
from . import calls
from .groups import NAMES

_lock = threading.Lock()
# What is installed: in which cell, and what was there.
_installed: list[tuple[CellType, Callable[..., Any]]] = []


def install() -> None:
    """Let torch.distributed's object calls, whoever makes them, go through objcomm. Do it on every rank.

    A second call changes nothing.

    Raises:
        UsageError: one of torch's functions is not as this version of objcomm knows it, or not torch's any more, naming
            what differs. Nothing is changed then.

    >>> install()
    >>> is_installed()
    True
    >>> uninstall()
    """
    with _lock:
        if not _installed:
            # All are looked at before the first is changed.
            found = [(_cell_of(name), getattr(calls, name)) for name in NAMES]
            for cell, ours in found:
                _installed.append((cell, cell.cell_contents))
                cell.cell_contents = ours


def uninstall() -> None:
    """Put torch's own functions back. Without :func:`install` before, nothing happens."""
    with _lock:
        while _installed:
            cell, theirs = _installed.pop()
            cell.cell_contents = theirs


def is_installed() -> bool:
    """Whether torch.distributed's object calls go through objcomm."""
    return bool(_installed)


@contextmanager
def installed() -> Iterator[None]:
    """Installed inside of a ``with``, and as it was before afterwards.

    >>> with installed():
    ...     is_installed()
    True
    >>> is_installed()
    False
    """
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _cell_of(name: str) -> CellType:
    """Where the wrapper that torch calls ``name`` holds the function that does the work.

    Raises:
        UsageError: that is not as it is known.
    """
    wrapper = vars(c10d).get(name)
    inner = getattr(wrapper, "__wrapped__", None)
    if vars(dist).get(name) is not wrapper:
        raise _refusal(name, "torch.distributed and torch.distributed.distributed_c10d have different ones")
    if not isinstance(inner, FunctionType) or inner.__module__ != c10d.__name__:
        raise _refusal(name, f"something else has been put in its place: {wrapper!r}")
    cells = [cell for cell in getattr(wrapper, "__closure__", None) or () if _holds(cell, inner)]
    if len(cells) != 1:
        raise _refusal(name, f"its wrapper is another one: {wrapper!r}")
    theirs, ours = _parameters(inner), _parameters(getattr(calls, name))
    if theirs != ours[: len(theirs)]:
        raise _refusal(name, f"its parameters are {', '.join(theirs)}, known are {', '.join(ours)}")
    found: CellType = cells[0]
    return found


def _holds(cell: CellType, inner: Callable[..., Any]) -> bool:
    try:
        return cell.cell_contents is inner
    except ValueError:
        return False  # an empty cell


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Their names, with a mark where one is of an unusual kind."""
    parameters = inspect.signature(function).parameters.values()
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name if each.kind is usual else str(each) for each in parameters]


def _refusal(name: str, what: str) -> UsageError:
    return UsageError(
        f"torch.distributed.{name} of torch {torch.__version__} cannot be replaced: {what}",
        hint="call the functions of objcomm.torch_compat themselves",
    )
