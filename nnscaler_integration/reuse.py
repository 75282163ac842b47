"""Code that was generated without the integration is not silently reused where it needed it."""

from __future__ import annotations

import ast
import builtins
import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nnscaler import parallel

from . import collisions
from .patching import Patch

_log = logging.getLogger(__name__)

_PICKLED_CALLS = ("nnscaler.runtime.adapter.move_object", "nnscaler.runtime.adapter.broadcast_object")


def patches(version: str) -> list[Patch]:
    return [Patch(parallel, "_prepare_and_check_reusable", _check_code)]


def _check_code(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_and_check_reusable(
        gen_savedir: Any, module: Any, compute_config: Any, instance_name: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Path, bool]:
        namespace, folder = parallel._prepare_namespace(gen_savedir, module, instance_name)
        call = collisions.running_call()
        loads = bool(call.get("load_module"))
        if loads:
            collisions.before_generating(namespace, folder)
        outdir, reusable = original(gen_savedir, module, compute_config, instance_name, *args, **kwargs)
        fault = fault_of_folder(outdir) if reusable else None
        if fault is None:
            if reusable and loads:
                collisions.before_loading_again(namespace, folder, call.get("module_or_module_class"))
            return outdir, reusable
        if parallel._is_any_gencode_loaded(namespace):
            raise RuntimeError(
                f"the code in {outdir} was generated without nnscaler_integration ({fault}) and is loaded already: "
                f"generate it again in a new process"
            )
        _log.warning("generating again what was generated without nnscaler_integration in %s (%s)", outdir, fault)
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
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _PICKLED_CALLS:
            return f"it moves objects by {ast.unparse(node.func)}"
    known = set(dir(builtins)) | _names(tree.body, nested=False)
    for function in _functions(tree):
        inside = known | _names([function], nested=True)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in inside:
                return f"{function.name} uses {node.id}, which nothing defines"
    return None


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of the module and the methods of its classes; functions nested in them belong to them."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]


def _names(statements: Sequence[ast.stmt], nested: bool) -> set[str]:
    """What the statements define, with ``nested`` inside functions and classes as well."""
    names: set[str] = set()
    todo: list[ast.AST] = list(statements)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
            names |= set(vars(importlib.import_module(node.module)))
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            if not nested:
                continue
        todo += ast.iter_child_nodes(node)
    return names
