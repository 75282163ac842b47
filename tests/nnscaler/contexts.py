"""Circumstances under which code is generated and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import nnscaler_integration
from nnscaler_integration import compat
from nnscaler_integration.patching import Patches


@contextmanager
def asynchronous(wanted: bool | str) -> Iterator[None]:
    """What ASYNC_COMM=1 sets; ``parallelize`` of 0.8 sets it back, so it is set behind that.

    With "objects", tensors stay synchronous: between stages with several devices, nnScaler itself computes with tensors
    that have not arrived.
    """
    from nnscaler import parallel
    from nnscaler.codegen.emit import FuncEmission
    from nnscaler.flags import CompileFlag

    original: Callable[..., Any] = parallel._compile_flags

    @contextmanager
    def flags(config: Any) -> Iterator[None]:
        with original(config):
            CompileFlag.async_comm = bool(wanted)
            yield

    emit_adapter = FuncEmission.emit_adapter

    def emit_synchronous(self: Any, node: Any, prefix_attr: Any = None, async_op: bool = False) -> Any:
        return emit_adapter(self, node, prefix_attr, False)

    isend = dist.isend
    held: list[Any] = []

    def held_isend(*args: Any, **kwargs: Any) -> Any:
        # 0.8 drops the handle of a tensor's send; gloo then gives the send up.
        held.append(isend(*args, **kwargs))
        return held[-1]

    if wanted:
        parallel._compile_flags = flags
        if wanted == "objects":
            FuncEmission.emit_adapter = emit_synchronous
        elif nnscaler_integration.status().nnscaler == "0.8":
            dist.isend = held_isend
    try:
        yield
        for work in held:
            work.wait()
    finally:
        parallel._compile_flags = original
        FuncEmission.emit_adapter = emit_adapter
        dist.isend = isend


@contextmanager
def repaired(wanted: bool) -> Iterator[None]:
    """Only what 0.8 needs on a newer torch, without which it generates nothing that could be compared."""
    wanted = wanted and compat.needed(str(nnscaler_integration.status().nnscaler))
    patches = Patches()
    restore = None
    if wanted:
        patches.apply(compat.patches())
        restore = compat.drop_pybind_leaves()
    try:
        yield
    finally:
        patches.revert()
        if restore is not None:
            restore()
