"""Reading generated code."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable


def undefined_names(source: str) -> list[str]:
    """The names that a function uses and neither it nor the module nor Python defines."""
    defined = set(dir(builtins)) | {"__name__", "__file__"}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            defined |= set(vars(importlib.import_module(str(node.module))))
    top = symtable.symtable(source, "generated", "exec")
    defined |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    missing = []
    todo = list(top.get_children())
    while todo:
        table = todo.pop()
        todo += table.get_children()
        if isinstance(table, symtable.Function):
            missing += [f"{table.get_name()}: {name}" for name in table.get_globals() if name not in defined]
    return missing


def imports(source: str) -> set[str]:
    """The top-level packages that the code imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def body(source: str, name: str) -> list[str]:
    """The lines of a function or method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines = source.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
            return [line.strip() for line in lines if line.strip()]
    raise KeyError(name)


def transfers(source: str) -> list[str]:
    """The lines that call objcomm to move something."""
    return re.findall(r"^.*objcomm\.(?:move|broadcast)_object\(.*$", source, re.MULTILINE)
