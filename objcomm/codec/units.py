"""How what is defined by a generated module travels: what it is is told by a digest of its source, not by its name.

A class or function goes as the module's name, its source as it was at import, and where in the module it is, with the
same of the generated modules that this one imports. The receiver takes its own module if that has the same digest;
otherwise it makes the module from the source, once for each digest, and keeps it apart from what its own imports find.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from ..errors import DecodeError, EncodeError
from . import generated, imports, modulesource, rebuilding, versions
from .modulesource import Namespace
from .rebuilding import Source, digest_of

_HINT = "call objcomm.register_generated(module) right after the module has been imported"
_UNIT = "__objcomm_unit__"


class Unit:
    """A generated module on its way, and those that it needs; it arrives as the module.

    Attributes:
        sources: its own, then those of all generated modules that it needs.
        ordinary: the other modules of the program that it imports: name, code and file.
    """

    def __init__(self, sources: list[Source], ordinary: list[tuple[str, str, str]]) -> None:
        self.sources, self.ordinary = sources, ordinary
        self.digest = digest_of(sources, 0)

    def __reduce__(self) -> Any:
        return receive, ([tuple(source) for source in self.sources], self.ordinary, self.digest)


# -- sending -----------------------------------------------------------------------------------------------------------


def reduce(obj: Any) -> tuple[Any, ...] | None:
    """How a class or function of a generated module is pickled; None for any other.

    Raises:
        EncodeError: the source of its module is not known any more.
    """
    place = generated.place_of(obj)
    return None if place is None else (_at_path, (_unit(place[0]), place[1]))


def reduce_module(module: types.ModuleType) -> tuple[Any, ...] | None:
    """How a generated module itself is pickled; None for any other."""
    return (_itself, (_unit(vars(module)),)) if generated.is_generated(vars(module)) else None


def reduce_inside(module: types.ModuleType, path: str) -> tuple[Any, ...] | None:
    """How what a generated module has at a path is pickled; None for what any other has."""
    return (_at_path, (_unit(vars(module)), path)) if generated.is_generated(vars(module)) else None


def reduce_at(namespace: Namespace, path: str, obj: Any) -> tuple[Any, ...] | None:
    """How an object is pickled that a generated module has at a path; None if it is not there, or of another module."""
    if not generated.has(namespace, path, obj) or not generated.is_generated(namespace):
        return None
    return _at_path, (_unit(namespace), path)


def _unit(namespace: Namespace) -> Unit:
    source = modulesource.source_of(namespace)
    if source is None:
        name = namespace.get("__name__")
        raise EncodeError(f"the source of {name} as it was at import is not known any more", hint=_HINT)
    renamed = generated.renamed(namespace)
    unit = namespace.get(_UNIT)
    if not isinstance(unit, Unit) or unit.sources[0].renamed != renamed or unit.sources[0].source != source:
        unit = namespace[_UNIT] = _Closure(namespace).unit()
    return unit


class _Closure:
    """A generated module and all that it needs, directly or not."""

    def __init__(self, namespace: Namespace) -> None:
        self._sources: list[Source] = []
        self._numbers: dict[int, int] = {}
        self._ordinary: dict[str, tuple[str, str, str]] = {}
        self._add(namespace)

    def unit(self) -> Unit:
        return Unit(self._sources, list(self._ordinary.values()))

    def _add(self, namespace: Namespace) -> int:
        number = self._numbers.get(id(namespace))
        if number is not None:
            return number
        number = self._numbers[id(namespace)] = len(self._sources)
        text = str(modulesource.source_of(namespace))
        name, file = str(namespace.get("__name__")), str(namespace.get("__file__"))
        self._sources.append(Source(name, text, file, generated.renamed(namespace), (), ()))
        needs: tuple[list[int], list[int]] = [], []
        for inner, at_once in imports.namespaces_of(namespace, text):
            if inner is namespace:
                continue
            if generated.is_generated(inner) and modulesource.source_of(inner) is not None:
                needs[not at_once].append(self._add(inner))
            elif number == 0:
                self._add_ordinary(str(inner.get("__name__")), inner)
        self._sources[number] = self._sources[number]._replace(needs=tuple(needs[0]), later=tuple(needs[1]))
        return number

    def _add_ordinary(self, name: str, namespace: Namespace) -> None:
        module = sys.modules.get(name)
        if module is not None and vars(module) is namespace:
            version = versions.version(module)
            if version is not None:
                self._ordinary[name] = (name, *version)


# -- receiving ---------------------------------------------------------------------------------------------------------


def receive(parts: Any, ordinary: Any, digest: str) -> types.ModuleType:
    """The module with that digest: this process' own, or one that is made from the source."""
    sources = [Source(*each) for each in parts]
    if digest_of(sources, 0) != digest:
        raise DecodeError(f"the source of {sources[0].name} was damaged on the way")
    module = rebuilding.Modules(sources).find(0)
    for name, code, file in ordinary:
        found = sys.modules.get(name)
        if found is not None:
            versions.check(found, versions.Version(code, file))
    return module


def _itself(module: types.ModuleType) -> types.ModuleType:
    return module


def _at_path(module: types.ModuleType, path: str) -> Any:
    try:
        return generated.at(vars(module), path)
    except (KeyError, TypeError) as error:
        raise DecodeError(f"the generated module {module.__name__} has no {path}") from error
