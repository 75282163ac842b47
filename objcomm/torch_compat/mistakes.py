"""Errors of objcomm that are also of the type that torch raises for the same mistake.

torch pickles, so a program may catch what pickle raises: ``AttributeError`` for an instance of a class that was made
inside a function, ``TypeError`` for a lock. The error that is raised here is both: objcomm's, with rank and path, and
pickle's.
"""

from __future__ import annotations

import pickle
from types import TracebackType

from ..codec.plain import plain_pickle
from ..config import restricted_trust
from ..errors import DecodeError, EncodeError, ObjcommError, TrustError

_PICKLES: dict[type[ObjcommError], tuple[type[Exception], ...]] = {
    EncodeError: (AttributeError, TypeError, ValueError, pickle.PicklingError),
    DecodeError: (AttributeError, TypeError, ValueError, EOFError, ModuleNotFoundError, pickle.UnpicklingError),
    TrustError: (pickle.UnpicklingError,),
}


# An ImportError has a path of its own, which would stand before the one of the object.
_path = property(lambda error: vars(error).get("path"), lambda error, path: vars(error).update(path=path))


def _both(kind: type[ObjcommError], other: type[Exception]) -> type[ObjcommError]:
    """A class of this module, so that an instance can be pickled: frameworks send errors to other ranks."""
    name = f"{kind.__name__.removesuffix('Error')}{other.__name__}"
    doc = f":class:`objcomm.{kind.__name__}` where torch raises ``{other.__name__}``."
    made = type(name, (kind, other), {"__module__": __name__, "__doc__": doc, "path": _path})
    globals()[name] = made
    return made


_BOTH = {kind: {other: _both(kind, other) for other in others} for kind, others in _PICKLES.items()}


def of_torchs_type(error: ObjcommError) -> ObjcommError:
    """The error, as one that is of torch's type too, if torch has another type for it.

    >>> lock = EncodeError("a lock cannot be pickled", path="obj[0]")
    >>> lock.__cause__ = TypeError("cannot pickle '_thread.lock' object")
    >>> isinstance(of_torchs_type(lock), TypeError)
    True
    """
    others = _BOTH.get(type(error))
    if others is None:
        return error
    cause = error.__cause__
    while isinstance(cause, ObjcommError):
        cause = cause.__cause__
    wanted: BaseException | None = pickle.UnpicklingError() if isinstance(error, TrustError) else cause
    for other, made in others.items():
        if isinstance(wanted, other):
            both = made(error.text)
            both.__dict__.update(error.__dict__)
            both.__cause__ = error.__cause__
            return both.with_traceback(error.__traceback__)
    return error


class AsTorch:
    """Around a call: pickle as torch does, trust no more than ``weights_only`` says, raise what torch raises."""

    __slots__ = ("_pickling", "_trust")

    def __init__(self, weights_only: bool) -> None:
        self._trust = restricted_trust(bool(weights_only))
        self._pickling = plain_pickle()

    def __enter__(self) -> None:
        self._trust.__enter__()
        self._pickling.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pickling.__exit__()
        self._trust.__exit__()
        if isinstance(error, ObjcommError):
            told = of_torchs_type(error)
            if told is not error:
                raise told from error.__cause__
