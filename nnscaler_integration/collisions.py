"""Several parallelized modules in one process do not get each other's code or weights.

nnScaler names generated code after the class and the instance name. Another module of the same class, or another
folder, under a name that is loaded already would silently be given what is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from nnscaler import parallel

from . import loading, parts, weights
from .patching import Patch


def patches(version: str) -> list[Patch]:
    return [
        Patch(parallel, "_prepare_namespace", _check_name),
        Patch(parallel, "_load_parallel_module_class", _load_exactly),
    ]


def _check_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_namespace(
        gen_savedir: Any, module_or_module_class: Any, instance_name: str | None = None
    ) -> tuple[str, Path]:
        parts_of_name = (instance_name or "_").strip(".").split(".")
        if any(not part or os.sep in part or "/" in part or "\\" in part for part in parts_of_name):
            raise ValueError(
                f"instance_name {instance_name!r} is part of the name of a Python module: no path, but names with dots "
                f"between them; the folder is given by gen_savedir"
            )
        namespace, folder = original(gen_savedir, module_or_module_class, instance_name)
        return str(namespace), Path(folder)

    return _prepare_namespace


def _load_exactly(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_parallel_module_class(
        module_class: type,
        *,
        gen_savedir: Any = "./.nnscaler",
        instance_name: str | None = None,
        rank: int | None = None,
    ) -> Any:
        number = dist.get_rank() if rank is None else rank
        namespace, folder = parallel._prepare_namespace(gen_savedir, module_class, instance_name)
        module = loading.load(f"{namespace}.gencode{number}", folder / f"gencode{number}.py")
        _refuse_other_class(module, module_class)
        cls = original(module_class, gen_savedir=gen_savedir, instance_name=instance_name, rank=rank)
        names = (module_class.__module__, module_class.__name__, module_class.__qualname__)
        parts.adopt(cls, module_class, names)
        return cls

    return _load_parallel_module_class


def _refuse_other_class(module: Any, module_class: type) -> None:
    known = vars(getattr(module, loading.CLASS)).get("__orig_module_class__", module_class)
    if known is not module_class:
        raise RuntimeError(
            f"{module.__file__} is loaded as {module.__name__} for another class that is called "
            f"{module_class.__module__}.{module_class.__qualname__} too: give one of the two its own instance_name"
        )


def before_generating(namespace: str, folder: Path) -> None:
    """Raise before anything is generated if it could not be loaded afterwards."""
    for name in _loaded_names(namespace):
        loading.refuse_other(name, folder / f"{name.rpartition('.')[2]}.py")


_weights_follow: ContextVar[bool] = ContextVar("_weights_follow", default=False)


@contextmanager
def weights_follow() -> Iterator[None]:
    """The caller gives what is loaded meanwhile its weights: those that were stored with the code do not matter."""
    token = _weights_follow.set(True)
    try:
        yield
    finally:
        _weights_follow.reset(token)


def before_loading_again(namespace: str, folder: Path, module: Any) -> None:
    """Raise if the code is loaded already and what was stored with it are not the weights of the module.

    Args:
        namespace: what the names of the generated modules begin with.
        folder: where they are.
        module: the module or class that is parallelized, nothing is checked for a class.
    """
    names = _loaded_names(namespace)
    if not names or not isinstance(module, torch.nn.Module) or _weights_follow.get():
        return
    different = weights.differing(folder, module)
    if different:
        raise RuntimeError(
            f"{sys.modules[names[0]].__file__} is loaded as {names[0]} in this process already, with the weights of "
            f"another {type(module).__qualname__}: {', '.join(different[:3])}{' ...' if len(different) > 3 else ''} "
            f"would not be those of the module to parallelize. Give it its own instance_name"
        )


def _loaded_names(namespace: str) -> list[str]:
    return [name for name in list(sys.modules) if name.startswith(f"{namespace}.gencode")]


def running_call() -> dict[str, Any]:
    """The arguments of the call of ``parallelize`` that is running: the functions below it get only some of them."""
    frame: FrameType | None = sys._getframe(1)
    code = parallel.parallelize.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals
