"""Which modules the import statements of a source have led to."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from typing import Any

from . import modulesource
from .modulesource import Namespace

# In a module that was made here: the namespaces of those that were made for it, by their names.
NEEDED = "__objcomm_needed__"


def namespaces_of(namespace: Namespace, source: str) -> list[tuple[Namespace, bool]]:
    """The namespaces of modules that a module has imported, and whether that was when it was made, or in a function."""
    found: dict[int, tuple[Namespace, bool]] = {}
    for statement, at_once in _imports(ast.parse(source), True):
        for alias in statement.names:
            for other in _led_to(namespace, statement, alias, at_once):
                known = found.get(id(other))
                found[id(other)] = other, at_once or (known is not None and known[1])
    return list(found.values())


def _imports(node: ast.AST, at_once: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_once
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, at_once and not function)


def _led_to(
    namespace: Namespace, statement: ast.Import | ast.ImportFrom, alias: ast.alias, at_once: bool
) -> Iterator[Namespace]:
    bound: Any = namespace.get(alias.asname or alias.name) if at_once else None
    if isinstance(bound, types.ModuleType):
        yield vars(bound)
        return
    if isinstance(statement, ast.Import):
        yield from _current(namespace, alias.name)
        return
    above = _absolute(statement, str(namespace.get("__package__") or ""))
    home = modulesource.namespace_of(bound) if isinstance(bound, (type, types.FunctionType)) else None
    if home is not None:
        yield home
    if home is None or home.get("__name__") != above:
        yield from _current(namespace, f"{above}.{alias.name}") or _current(namespace, above)


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    levels = parts[: len(parts) - statement.level + 1] if statement.level else []
    return ".".join([*levels, *([statement.module] if statement.module else [])])


def _current(namespace: Namespace, name: str) -> list[Namespace]:
    needed = namespace.get(NEEDED, {}).get(name)
    if needed is not None:
        return [needed]
    module = sys.modules.get(name)
    return [vars(module)] if isinstance(module, types.ModuleType) else []
