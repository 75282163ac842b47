"""Composites: types that travel as named parts and are put together again by a function of this process.

Layouts of tensors and lowered modules register here. The parts are ordinary objects, plain tensors among them; a
composite that occurs twice in an object is taken apart once and built once, so its identity is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from ..errors import UsageError

if TYPE_CHECKING:
    from .memory import MemoryWriter


class Gathering(Protocol):
    """What several objects of one message travel in together; see :func:`register_gathered`.

    Attributes:
        name: what both ends call this kind of gathering.
        parts: what it consists of itself, filled by :meth:`finish` with native values, bytes and tensors.
    """

    name: str
    parts: list[Any]

    def add(self, obj: Any) -> Sequence[Any]:
        """The parts of one of the objects: this gathering, and what finds the object in it."""

    def finish(self, memory: MemoryWriter, forbid_grad: bool) -> None:
        """All objects have been added, and all other memory of the message is known."""


@dataclass(frozen=True)
class Entry:
    """One kind of composite; see :func:`register`."""

    name: str
    matches: Callable[[Any], bool]
    flatten: Callable[[Any], Sequence[Any]]
    rebuild: Callable[[list[Any]], Any]
    code: bool
    base: type
    instances: bool
    gather: Callable[[], Gathering] | None = None


_entries: dict[str, Entry] = {}
_candidates: WeakKeyDictionary[type, tuple[Entry, ...]] = WeakKeyDictionary()


def register(
    name: str,
    matches: Callable[[Any], bool],
    flatten: Callable[[Any], Sequence[Any]],
    rebuild: Callable[[list[Any]], Any],
    code: bool = False,
    *,
    base: type = object,
    instances: bool = False,
) -> None:
    """Make a kind of object travel as its parts instead of as a pickle.

    Both ends must have registered the same name. What was registered later is asked first.

    Args:
        name: what both ends call this kind, part of the protocol.
        matches: whether an object is of this kind. It is asked for every object whose type derives from ``base`` and
            that the codec does not know otherwise.
        flatten: the parts, any objects that can be sent. It may raise :class:`EncodeError` to refuse an object.
        rebuild: builds the object from a list of the parts. In restricted trust the parts may come from anyone: it
            validates them, and an exception becomes a :class:`DecodeError`.
        code: the parts hold code (an archive of a lowered module, say): restricted trust refuses it on both ends.
        base: only objects whose type derives from it are asked about.
        instances: ``rebuild`` runs nothing of its parts, so restricted trust may hand it dataclasses and namedtuples.

    Raises:
        UsageError: the name is taken by another kind.

    >>> import fractions
    >>> register(
    ...     "example.Fraction",
    ...     lambda obj: type(obj) is fractions.Fraction,
    ...     lambda obj: [obj.numerator, obj.denominator],
    ...     lambda parts: fractions.Fraction(*parts),
    ...     base=fractions.Fraction,
    ... )
    >>> unregister("example.Fraction")
    """
    _add(Entry(name, matches, flatten, rebuild, code, base, instances))


def _add(entry: Entry) -> None:
    known = _entries.get(entry.name)
    if known is not None and known != entry:
        raise UsageError(f"a composite named {entry.name!r} is registered already")
    _entries[entry.name] = entry
    _candidates.clear()


def register_gathering(kind: type[Gathering], rebuild: Callable[[list[Any]], Any], code: bool = False) -> None:
    """Name what rebuilds a gathering from its parts; see :func:`register_gathered`."""
    register(kind.name, lambda obj: True, lambda obj: obj.parts, rebuild, code, base=kind)


def register_gathered(
    name: str,
    matches: Callable[[Any], bool],
    gather: Callable[[], Gathering],
    rebuild: Callable[[list[Any]], Any],
    code: bool = False,
    *,
    base: type = object,
) -> None:
    """The same as :func:`register` for objects that travel together: all of one message in one gathering.

    Args:
        gather: makes the gathering of a message; kinds that have it in common share the gathering.
        rebuild: builds one object from the parts that ``Gathering.add`` gave, the gathering rebuilt.
    """

    def flatten(obj: Any) -> Sequence[Any]:
        return gather().add(obj)

    _add(Entry(name, matches, flatten, rebuild, code, base, False, gather))


def unregister(name: str) -> None:
    """Forget a kind; objects of it are then sent as any other object of their type."""
    _entries.pop(name, None)
    _candidates.clear()


def named(name: str) -> Entry | None:
    """The kind of that name, or None."""
    return _entries.get(name)


def find(obj: Any) -> Entry | None:
    """The kind that takes this object, or None."""
    for entry in _candidates_of(type(obj)):
        if entry.matches(obj):
            return entry
    return None


def may_match(cls: type) -> bool:
    """Whether there is any kind to be asked about objects of that type."""
    return bool(_candidates_of(cls))


def _candidates_of(cls: type) -> tuple[Entry, ...]:
    candidates = _candidates.get(cls)
    if candidates is None:
        candidates = tuple(entry for entry in reversed(list(_entries.values())) if entry.base in cls.__mro__)
        _candidates[cls] = candidates
    return candidates
