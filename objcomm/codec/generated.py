"""Modules that a program generates: which modules these are.

A generator writes many files whose class bears one name, each rank has files of its own under the same name, and a file
is written anew for the next run. Their names say nothing; units.py has how they travel.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from ..errors import UsageError
from . import classes, modulesource
from .modulesource import Namespace, module_name, qualname

MARK = "__objcomm_generated__"

_registered: set[str] = set()
_found: dict[str, tuple[types.ModuleType, bool]] = {}


def register_generated(module: types.ModuleType | str, *, source: str | None = None) -> None:
    """Say that a module is generated code: what its classes and functions are is told by their source, not by name.

    Objects of its classes then arrive with the class that they had at the sender, also where the receiver has other
    code under that name. Call it right after the import, or in the module itself with ``__name__``: the source is
    remembered as it is now. Modules that no import would find under their name are taken for generated anyway.

    Args:
        module: a module or its name; all modules whose names begin with it and a dot are registered too.
        source: what the module was made from, where that is not in its file.

    Raises:
        UsageError: neither a module nor a name, a source for a module that is not there, or one that is not Python.

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
        text = _checked(source, name) if source is not None else modulesource.read_as_imported(vars(known))
        if text is not None:
            modulesource.remember(vars(known), text)


def _checked(source: str, name: str) -> str:
    try:
        compile(source, f"<{name}>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the source that is registered for {name} is none of Python: {error}") from error
    return source


def _is_registered(namespace: Namespace) -> bool:
    parts = str(namespace.get("__name__")).split(".")
    names = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return MARK in namespace or any(name in _registered for name in names)


def owns(obj: Any) -> bool:
    """Whether a class or function is defined by a generated module."""
    return place_of(obj) is not None


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


# -- where a class or function is --------------------------------------------------------------------------------------


def place_of(obj: Any) -> tuple[Namespace, str] | None:
    """The namespace of the generated module that defines a class or function, and the place in it; None of others."""
    if not classes.resolves(obj):
        return _place(obj)
    namespace = _home(obj)
    return None if namespace is None else (namespace, qualname(obj))


def is_generated(namespace: Namespace) -> bool:
    """Whether a namespace is that of a generated module."""
    name = str(namespace.get("__name__"))
    module = sys.modules.get(name)
    if module is not None and vars(module) is namespace:
        return _is_known(name, module)
    ours = _is_registered(namespace) or modulesource.is_ours(namespace)
    return ours and modulesource.source_of(namespace) is not None


def renamed(namespace: Namespace) -> dict[str, tuple[str, str]]:
    """The classes of a module that have been given other names than where they are, by where they are."""
    name = namespace.get("__name__")
    found = {}
    for path, member in list(namespace.items()):
        if isinstance(member, type) and classes.name_of(member)[0] == name:
            names = member.__name__, classes.name_of(member)[1]
            if names != (path, path) and not has(namespace, names[1], member):
                found[path] = names
    return found


def has(namespace: Namespace, path: str, obj: Any) -> bool:
    try:
        return at(namespace, path) is obj
    except (KeyError, TypeError):
        return False


def at(namespace: Namespace, path: str) -> Any:
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
        if current and not isinstance(obj, type) and not is_generated(namespace):
            return None
        if not modulesource.is_ours(namespace) or modulesource.source_of(namespace) is None:
            return None
    path = _path_in(namespace, obj, qualname(obj))
    return None if path is None else (namespace, path)


_nowhere = types.ModuleType("nowhere")


def _path_in(namespace: Namespace, obj: Any, qualname: str) -> str | None:
    if has(namespace, qualname, obj):
        return qualname
    level = [(path, member) for path, member in list(namespace.items())]
    module = namespace.get("__name__")
    for path, member in level:
        if member is obj:
            return path
        if isinstance(member, type) and classes.name_of(member)[0] == module and path.count(".") < 5:
            level += [(f"{path}.{name}", inner) for name, inner in list(classes.dict_of(member).items())]
    return None
