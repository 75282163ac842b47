"""Pickling as Python's own pickle does it, for programs that were written for that."""

from __future__ import annotations

from contextvars import ContextVar

from ..scope import Scope

_is_on: ContextVar[bool] = ContextVar("objcomm_plain_pickle", default=False)


def plain_pickle() -> Scope:
    """What this thread encodes inside is pickled as Python's own pickle does, and refused where that refuses it.

    Classes and functions then go by reference alone, so a lambda or a class made inside of a function is an error.
    Dataclasses are pickled too, with their tensors kept out of the stream: for objects that are thousands of small
    ones, such as the plans of torch's checkpoints, that takes less time. Restricted trust, which refuses all
    that is pickled, takes them apart as ever.
    """
    return Scope(_is_on, True)


def is_on() -> bool:
    return _is_on.get()
