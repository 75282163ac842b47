"""Modules that a program generates: their names say nothing, so that what they are is told by a digest of their source.

A generator writes many files whose class bears one name, each rank has files of its own under the same name, and a file
is written anew for the next run. A class or function of such a module travels as the module's name, its source as it
was at import, and where in the module it is. The receiver takes its own module if that has the same digest; otherwise
it makes the module from the source, once for each digest, and keeps it apart from what its own imports find.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from ..errors import DecodeError, EncodeError, UsageError
from . import classes, modulesource
from .modulesource import Namespace, module_name, qualname
from .path import reason

MARK = "__objcomm_generated__"

_registered: set[str] = set()
_found: dict[str, tuple[types.ModuleType, bool]] = {}
_rebuilt: dict[str, types.ModuleType] = {}
_lock = threading.RLock()
_making = threading.RLock()


def register_generated(module: types.ModuleType | str, *, source: str | None = None) -> None:
    """Say that a module is generated code: what its classes and functions are is told by their source, not by name.

    Objects of its classes then arrive with the class that they had at the sender, also where the receiver has other
    code under that name. Call it right after the import, or in the module itself with ``__name__``: the source is
    remembered as it is now. Modules that no import would find under their name are taken for generated anyway.

    Args:
        module: a module or its name; all modules whose names begin with it and a dot are registered too.
        source: what the module was made from, where that is not in its file.

    Raises:
        UsageError: neither a module nor a name, or a source for a module that is not there.

    >>> register_generated("my_generated_code")
    """
    name = module.__name__ if isinstance(module, types.ModuleType) else module
    if not isinstance(name, str):
        raise UsageError(f"a module or the name of one is registered, not a {type(module).__name__}")
    known = module if isinstance(module, types.ModuleType) else sys.modules.get(name)
    if source is not None and known is None:
        raise UsageError(f"there is no module {name} to which the source could belong")
    _registered.add(name)
    _found.clear()
    if isinstance(known, types.ModuleType):
        text = source or modulesource.read(vars(known))
        if text is not None:
            modulesource.remember(vars(known), text)


def _is_registered(namespace: Namespace) -> bool:
    parts = str(namespace.get("__name__")).split(".")
    names = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return MARK in namespace or any(name in _registered for name in names)


def owns(obj: Any) -> bool:
    """Whether a class or function is defined by a generated module."""
    return _home(obj) is not None if classes.resolves(obj) else _place(obj) is not None


def owns_named(cls: type) -> bool:
    """The same for a class that has been found under its name already."""
    return _home(cls) is not None


def _home(obj: Any) -> Namespace | None:
    """The namespace of a class or function that is found under its name, if its module is a generated one."""
    name = module_name(obj)
    module = sys.modules[name]
    return vars(module) if _is_known(name, module) else None


def _is_known(name: str, module: types.ModuleType) -> bool:
    """Whether the module of that name is known to be a generated one."""
    known = _found.get(name)
    if known is None or known[0] is not module:
        known = _found[name] = (module, _is_generated(vars(module)))
    return known[1]


def _is_generated(namespace: Namespace) -> bool:
    if _is_registered(namespace):
        return True
    return (
        modulesource.is_ours(namespace) and not _is_found(namespace) and modulesource.source_of(namespace) is not None
    )


def _is_found(namespace: Namespace) -> bool:
    """Whether an import of the module's name would find the module's file."""
    name, file = namespace["__name__"], namespace["__file__"]
    parent = sys.modules.get(name.rpartition(".")[0])
    path = getattr(parent, "__path__", None) if "." in name else None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:
            continue
        if spec is not None:
            return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    return False


# -- sending -----------------------------------------------------------------------------------------------------------


class Unit:
    """A generated module on its way."""

    def __init__(self, name: str, source: str, file: str, renamed: dict[str, tuple[str, str]]) -> None:
        self.name, self.source, self.file, self.renamed = name, source, file, renamed
        self.digest = _digest(name, source, renamed)

    def __reduce__(self) -> Any:
        return receive, (self.name, self.source, self.file, self.renamed, self.digest)


def _digest(name: str, source: str, renamed: dict[str, tuple[str, str]]) -> str:
    text = repr((name, sorted(renamed.items()), source))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _renamed(namespace: Namespace) -> dict[str, tuple[str, str]]:
    """The classes of a module that have been given other names than where they are, by where they are."""
    name = namespace.get("__name__")
    found = {}
    for path, member in list(namespace.items()):
        if isinstance(member, type) and classes.name_of(member)[0] == name:
            names = member.__name__, classes.name_of(member)[1]
            if names != (path, path) and not _has(namespace, names[1], member):
                found[path] = names
    return found


def _has(namespace: Namespace, path: str, obj: Any) -> bool:
    try:
        return _at(namespace, path) is obj
    except (KeyError, TypeError):
        return False


def _at(namespace: Namespace, path: str) -> Any:
    """What is at a path in a namespace.

    Raises:
        KeyError: nothing.
        TypeError: something on the way is no class.
    """
    first, *more = path.split(".")
    found = namespace[first]
    for name in more:
        found = classes.dict_of(found)[name]
        found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    return found


def _place(obj: Any) -> tuple[Namespace, str] | None:
    """The namespace and the place in it of a class or function that is not found by name, if its source is certain."""
    namespace = modulesource.namespace_of(obj)
    if namespace is None or "<locals>" in qualname(obj):
        return None
    if not _is_registered(namespace):
        current = vars(sys.modules.get(str(namespace.get("__name__")), _nowhere)) is namespace
        if not modulesource.is_ours(namespace) or (current and not isinstance(obj, type)):
            return None
        if modulesource.source_of(namespace) is None:
            return None
    path = _path_in(namespace, obj, qualname(obj))
    return None if path is None else (namespace, path)


_nowhere = types.ModuleType("nowhere")


def _path_in(namespace: Namespace, obj: Any, qualname: str) -> str | None:
    if _has(namespace, qualname, obj):
        return qualname
    level = [(path, member) for path, member in list(namespace.items())]
    module = namespace.get("__name__")
    for path, member in level:
        if member is obj:
            return path
        if isinstance(member, type) and classes.name_of(member)[0] == module and path.count(".") < 5:
            level += [(f"{path}.{name}", inner) for name, inner in list(classes.dict_of(member).items())]
    return None


def reduce(obj: Any) -> tuple[Any, ...] | None:
    """How a class or function of a generated module is pickled; None for any other.

    Raises:
        EncodeError: the source of its module is not known any more.
    """
    if classes.resolves(obj):
        namespace = _home(obj)
        place = None if namespace is None else (namespace, qualname(obj))
    else:
        place = _place(obj)
    return None if place is None else (_at_path, (_unit(place[0]), place[1]))


def reduce_module(module: types.ModuleType) -> tuple[Any, ...] | None:
    """How a generated module itself is pickled; None for any other."""
    namespace, name = vars(module), module.__name__
    if sys.modules.get(name) is module:
        owned = _is_known(name, module)
    else:
        ours = _is_registered(namespace) or modulesource.is_ours(namespace)
        owned = ours and modulesource.source_of(namespace) is not None
    return (_itself, (_unit(namespace),)) if owned else None


def _itself(module: types.ModuleType) -> types.ModuleType:
    return module


_HINT = "call objcomm.register_generated(module) right after the module has been imported"
_UNIT = "__objcomm_unit__"


def _unit(namespace: Namespace) -> Unit:
    source = modulesource.source_of(namespace)
    name = str(namespace.get("__name__"))
    if source is None:
        raise EncodeError(f"the source of {name} as it was at import is not known any more", hint=_HINT)
    renamed = _renamed(namespace)
    unit = namespace.get(_UNIT)
    if not isinstance(unit, Unit) or unit.renamed != renamed or unit.source != source:
        unit = namespace[_UNIT] = Unit(name, source, str(namespace.get("__file__")), renamed)
    return unit


# -- receiving ---------------------------------------------------------------------------------------------------------


def receive(name: str, source: str, file: str, renamed: dict[str, tuple[str, str]], digest: str) -> types.ModuleType:
    """The module with that digest: this process' own, or one that is made from the source."""
    if _digest(name, source, renamed) != digest:
        raise DecodeError(f"the source of {name} was damaged on the way")
    with _lock:
        own = _own(name, source)
        if own is not None and _digest(name, source, _renamed(vars(own))) == digest:
            return own
        if digest not in _rebuilt:
            _rebuilt[digest] = _make(name, source, file, renamed, digest)
        return _rebuilt[digest]


def _own(name: str, source: str) -> types.ModuleType | None:
    """This process' own module of that name and source, imported if need be."""
    module = sys.modules.get(name)
    if module is None:
        try:
            spec = importlib.util.find_spec(name)
            same = spec is not None and spec.loader is not None and _source_by(spec.loader, name) == source
            module = importlib.import_module(name) if same else None
        except Exception:
            return None
    same = isinstance(module, types.ModuleType) and modulesource.source_of(vars(module)) == source
    return module if same else None


def _source_by(loader: Any, name: str) -> str | None:
    return loader.get_source(name) if hasattr(loader, "get_source") else None


def _make(name: str, source: str, file: str, renamed: dict[str, tuple[str, str]], digest: str) -> types.ModuleType:
    filename = f"<{name} {digest[:12]} of {os.path.basename(file)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    namespace = vars(module)
    namespace.update({"__file__": filename, "__package__": name.rpartition(".")[0], MARK: True})
    modulesource.remember(namespace, source)
    try:
        with _findable(module):
            exec(compile(source, filename, "exec", dont_inherit=True), namespace)
        for path, (short, qualname) in renamed.items():
            cls = _at(namespace, path)
            cls.__name__, cls.__qualname__ = short, qualname
    except Exception as error:
        raise DecodeError(f"the generated module {name} cannot be made here: {reason(error)}") from error
    modulesource.homes.update(dict.fromkeys(modulesource.classes_of(namespace), namespace))
    return module


@contextlib.contextmanager
def _findable(module: types.ModuleType) -> Iterator[None]:
    """While a module is made, what looks for it by its name, as dataclasses do, finds it; unless another one has it."""
    with _making:
        mine = sys.modules.setdefault(module.__name__, module) is module
        try:
            yield
        finally:
            if mine:
                sys.modules.pop(module.__name__, None)


def _at_path(module: types.ModuleType, path: str) -> Any:
    try:
        return _at(vars(module), path)
    except (KeyError, TypeError) as error:
        raise DecodeError(f"the generated module {module.__name__} has no {path}") from error
