"""Code that was generated without the integration is not silently reused where it needed it."""

from __future__ import annotations

import ast
import builtins
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnscaler import parallel

from .patching import Patch

_log = logging.getLogger(__name__)

_PICKLED_CALLS = ("nnscaler.runtime.adapter.move_object", "nnscaler.runtime.adapter.broadcast_object")


def patches(version: str) -> list[Patch]:
    return [Patch(parallel, "_prepare_and_check_reusable", _check_code)]


def _check_code(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_and_check_reusable(
        gen_savedir: Any, module: Any, compute_config: Any, instance_name: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Path, bool]:
        outdir, reusable = original(gen_savedir, module, compute_config, instance_name, *args, **kwargs)
        fault = fault_of_folder(outdir) if reusable else None
        if fault is None:
            return outdir, reusable
        namespace, _ = parallel._prepare_namespace(gen_savedir, module, instance_name)
        if parallel._is_any_gencode_loaded(namespace):
            raise RuntimeError(
                f"the code in {outdir} was generated without nnscaler_integration ({fault}) and is loaded already: "
                f"generate it again in a new process"
            )
        _log.warning("generating the code in %s again: it was generated without nnscaler_integration (%s)", outdir, fault)
        parallel._clean_files(outdir, "*.py")
        return outdir, False

    return _prepare_and_check_reusable


def fault_of_folder(folder: Path) -> str | None:
    """What shows that generated code needed the integration and did not have it."""
    for path in sorted(folder.glob("gencode*.py")):
        fault = fault_of(path.read_text())
        if fault is not None:
            return f"{path.name}: {fault}"
    return None


def fault_of(source: str) -> str | None:
    """The same, of one rank's code.

    >>> fault_of("def _train_step(model): return model.segment(getitem_28)")
    '_train_step uses getitem_28, which nothing defines'
    >>> fault_of("def _train_step(model): return model")
    """
    for call in _PICKLED_CALLS:
        if f"{call}(" in source:
            return f"it moves objects by {call}"
    tree = ast.parse(source)
    known = set(dir(builtins)) | _defined(tree, [node for node in ast.walk(tree) if isinstance(node, ast.alias)])
    for function in _functions(tree):
        inside = known | _defined(function, [node for node in ast.walk(function) if isinstance(node, ast.alias)])
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in inside:
                return f"{function.name} uses {node.id}, which nothing defines"
    return None


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of the module and the methods of its classes; functions nested in them belong to them."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]


def _defined(scope: ast.AST, imports: list[ast.alias]) -> set[str]:
    names: set[str] = set()
    top = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in top:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module:
            names |= set(vars(importlib.import_module(node.module)))
        for part in ast.walk(node) if isinstance(node, ast.stmt) and not isinstance(node, _SCOPES) else [node]:
            if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
                names.add(part.id)
        if isinstance(node, _SCOPES):
            names.add(node.name)
        if isinstance(node, ast.arg):
            names.add(node.arg)
    return names | {(alias.asname or alias.name).split(".")[0] for alias in imports}


_SCOPES = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
