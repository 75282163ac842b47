"""nnScaler 0.8 on a torch newer than 2.6, the last that it declares: newer torch breaks two places of its tracer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import Node

from .patching import Patch


def needed(version: str) -> bool:
    """Whether the installed pair needs it."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return version == "0.8" and release > (2, 6)


def patches() -> list[Patch]:
    """The tracer's own test of impurity is called with one more argument by newer torch."""
    from nnscaler.graph.tracer.torch_fx_patcher import TorchFXPatcher

    if len(inspect.signature(Node.is_impure).parameters) < 2:
        return []
    return [Patch(TorchFXPatcher, "is_impure_new", _with_random_flag)]


def _with_random_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_impure_new(node: Node, impure_random: bool = True) -> bool:
        return bool(original(node))

    return is_impure_new


def drop_pybind_leaves() -> Callable[[], None]:
    """Take pybind11's helpers, which newer torch shows in its namespaces, out of what the tracer wraps: they refuse it.

    Returns what puts them back, in their old order.
    """
    from nnscaler.graph.tracer import wrap_utils

    leaves: dict[Any, Any] = wrap_utils.default_autowrap_leaf_function
    everything = dict(leaves)
    for function in everything:
        if getattr(function, "__qualname__", "").startswith("pybind11_detail"):
            del leaves[function]

    def restore() -> None:
        leaves.clear()
        leaves.update(everything)

    return restore
