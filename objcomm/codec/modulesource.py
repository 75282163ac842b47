"""The source of Python modules as it was when they were imported, and whose modules they are.

The file of a module may have been written anew since. What is read from it counts only if all functions that the module
has now are exactly those that the file would give, and its literals match as well.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from . import classes

_MAIN = ("__main__", "__mp_main__")
_KEPT = "__objcomm_source__"

Namespace = dict[str, Any]

# The namespaces of classes whose modules are not in sys.modules.
homes: WeakKeyDictionary[type, Namespace] = WeakKeyDictionary()


class _Kept(NamedTuple):
    """The source of a namespace, kept in it. Another spec means that the module was loaded again."""

    spec: Any
    text: str


def _kept(namespace: Namespace) -> _Kept | None:
    kept = namespace.get(_KEPT)
    return kept if isinstance(kept, _Kept) and kept.spec is namespace.get("__spec__") else None


def remember(namespace: Namespace, text: str) -> None:
    """Take this for the source of a module; the module is as it was made from it."""
    namespace[_KEPT] = _Kept(namespace.get("__spec__"), text)


def namespace_of(obj: Any) -> Namespace | None:
    """The namespace of the module that a class or function was defined in, whatever is called like that module now."""
    if isinstance(obj, types.FunctionType):
        return obj.__globals__
    if obj in homes:
        return homes[obj]
    name = classes.name_of(obj)[0]
    for function in functions_in(classes.dict_of(obj)):
        if function.__globals__.get("__name__") == name:
            return function.__globals__
    module = sys.modules.get(name)
    return vars(module) if isinstance(module, types.ModuleType) and classes.resolves(obj) else None


def module_name(obj: Any) -> str:
    """The name of the module of a class or function."""
    return classes.name_of(obj)[0] if isinstance(obj, type) else str(obj.__module__)


def qualname(obj: Any) -> str:
    """The qualified name of a class or function."""
    return classes.name_of(obj)[1] if isinstance(obj, type) else str(obj.__qualname__)


def functions_in(members: Any) -> Iterator[types.FunctionType]:
    """The functions among the members of a class or a module, taken out of what decorates them."""
    for member in list(members.values()):
        parts: list[Any] = [member.fget, member.fset, member.fdel] if type(member) is property else [member]
        for part in parts:
            if isinstance(part, (staticmethod, classmethod)):
                part = part.__func__
            while type(part) is types.FunctionType:
                yield part
                part = vars(part).get("__wrapped__")


def classes_of(namespace: Namespace) -> Iterator[type]:
    """The classes that a module defines, those inside of others too."""
    name = namespace.get("__name__")
    todo = [member for member in list(namespace.values()) if isinstance(member, type)]
    seen: set[int] = set()
    while todo:
        cls = todo.pop()
        if id(cls) not in seen and classes.name_of(cls)[0] == name:
            seen.add(id(cls))
            yield cls
            todo += (member for member in list(classes.dict_of(cls).values()) if isinstance(member, type))


def remembered(namespace: Namespace) -> str | None:
    """The source of a module, if it is known to be that since its import."""
    kept = _kept(namespace)
    return None if kept is None else kept.text


# -- source ------------------------------------------------------------------------------------------------------------


def source_of(namespace: Namespace) -> str | None:
    """The source of a module as it was at import, or None if that is not certain."""
    text = remembered(namespace)
    if text is not None:
        return text
    text = read(namespace)
    if text is None or not fits(namespace, text):
        return None
    remember(namespace, text)
    return text


def read(namespace: Namespace) -> str | None:
    """What the file of a module holds now."""
    name, file = namespace.get("__name__"), namespace.get("__file__")
    loader = namespace.get("__loader__")
    try:
        text = loader.get_source(name) if loader is not None else None
    except Exception:
        text = None
    if text is None and isinstance(file, str):
        linecache.checkcache(file)
        text = "".join(linecache.getlines(file)) or None
    return text if isinstance(text, str) else None


def read_as_imported(namespace: Namespace) -> str | None:
    """The file of a module that has just been imported, or is being; None if it has been written anew since.

    Names that the source assigns in several places may have any value by now.
    """
    text = read(namespace)
    return text if text is not None and fits(namespace, text, so_far=True) else None


def fits(namespace: Namespace, text: str, *, wholly: bool = False, so_far: bool = False) -> bool:
    """Whether a module may have been made from a source: its functions are in it, and its literals are the same.

    Args:
        wholly: what the source defines is all there as well. A module without functions has nothing else to go by.
        so_far: what the source defines may be missing as yet, and what it assigns several times need not have its
            last value.
    """
    file = str(namespace.get("__file__"))
    try:
        body = ast.parse(text).body
        possible = set(codes_in(compile(text, file, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    live = {function.__code__ for function in functions_of(namespace) if function.__code__.co_filename == file}
    if not live <= possible or not _has_literals(body, namespace, _changing(body) if so_far else frozenset()):
        return False
    return so_far or (bool(body) and _has_definitions(body, namespace, "")) if wholly or not live else True


def functions_of(namespace: Namespace) -> Iterator[types.FunctionType]:
    """The functions that a module has now, by itself and in its classes."""
    places = [namespace, *map(classes.dict_of, classes_of(namespace))]
    for place in places:
        for function in functions_in(place):
            if function.__globals__ is namespace:
                yield function


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """What something is compiled to, and what is inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def _has_definitions(body: list[ast.stmt], members: Any, cls: str) -> bool:
    """Whether the functions and classes of a source are there, in a module or a class."""
    for statement in body:
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        name = statement.name
        if cls and name.startswith("__") and not name.endswith("__"):
            name = f"_{cls.lstrip('_')}{name}"
        if name not in members:
            return False
        inner = members[name]
        is_class = isinstance(statement, ast.ClassDef) and isinstance(inner, type)
        if is_class and not _has_definitions(statement.body, classes.dict_of(inner), name):
            return False
    return True


def _changing(body: list[ast.stmt]) -> frozenset[str]:
    """Names and attributes that are assigned in several places of a source."""
    seen: set[str] = set()
    changing: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
            (changing if name in seen else seen).add(name)
    return frozenset(changing)


def _has_literals(body: list[ast.stmt], members: Any, changing: frozenset[str]) -> bool:
    """Whether the names that are assigned literals, in a module or its classes, still have these values."""
    last: dict[str, ast.expr] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            cls = members.get(statement.name)
            if isinstance(cls, type) and not _has_literals(statement.body, classes.dict_of(cls), changing):
                return False
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            last.update({target.id: statement.value for target in targets if isinstance(target, ast.Name)})
    for name, expression in last.items():
        if isinstance(expression, ast.Constant) and name in members and name not in changing:
            value = members[name]
            if type(value) is type(expression.value) and repr(value) != repr(expression.value):
                return False
    return True


# -- whose modules -----------------------------------------------------------------------------------------------------


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders of an installation: it is the business of who made that to make it alike on all ranks."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.path.dirname(__file__))]
    return tuple({os.path.realpath(folder) + os.sep for folder in folders if folder})


def is_ours(namespace: Namespace) -> bool:
    """Whether a module is a program's own: from a file that is not installed, and not the main module."""
    file = namespace.get("__file__")
    if not isinstance(file, str) or namespace.get("__name__") in _MAIN:
        return False
    return not os.path.realpath(file).startswith(_installed())


def is_main(namespace: Namespace) -> bool:
    """Whether it is the module that the program was started as."""
    return namespace.get("__name__") in _MAIN


def is_dynamic(namespace: Namespace) -> bool:
    """Whether a program has made a module without a file."""
    no_file = namespace.get("__file__") is None and namespace.get("__spec__") is None
    return no_file and not is_main(namespace)
