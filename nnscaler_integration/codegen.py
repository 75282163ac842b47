"""What the generated code of a rank says about objects: imports, groups, adapter calls, waits and releases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from nnscaler.codegen.emit import FuncEmission
from nnscaler.codegen.module.module import ModuleCodeGen
from nnscaler.codegen.schedule.schedule import ScheduleCodeGen
from nnscaler.execplan.execplan import ExecutionPlan
from nnscaler.flags import CompileFlag
from nnscaler.ir.cten import IRCell
from nnscaler.runtime import adapter as runtime_adapter

from .patching import Patch
from .prims import ObjectAdapter
from .timeline import Timeline, unwrap


def patches(version: str) -> list[Patch]:
    emit_node = _emit_node_08 if version == "0.8" else _emit_node_09
    return [
        Patch(ModuleCodeGen, "__init__", _init),
        Patch(ModuleCodeGen, "emit_comm_groups", _emit_comm_groups),
        Patch(ModuleCodeGen, "scale", _scale),
        Patch(FuncEmission, "emit_adapter", _emit_adapter),
        Patch(ScheduleCodeGen, "gen", _gen),
        Patch(ScheduleCodeGen, "emit_node", emit_node),
    ]


def _moves_objects(execplan: ExecutionPlan) -> bool:
    return bool(execplan.graph.select(ntype=ObjectAdapter))


# ---- the module


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: ModuleCodeGen, execplan: ExecutionPlan, *args: Any, **kwargs: Any) -> None:
        original(self, execplan, *args, **kwargs)
        if _moves_objects(execplan):
            # Where nnScaler's own imports begin; some versions join several of them in one entry.
            self.init_code.insert(self.init_code.index("import torch"), "import objcomm")

    return init


def _emit_comm_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    def emit_comm_groups(self: ModuleCodeGen) -> None:
        original(self)
        if _moves_objects(self.execplan):
            self.model_init_statements.append("# the heads of objects travel beside the groups of the accelerators")
            self.model_init_statements.append("objcomm.init_control()")
            self.model_init_statements.append(" ")

    return emit_comm_groups


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: ModuleCodeGen, node: IRCell, device: int) -> IRCell:
        scaled = original(self, node, device)
        return scaled.with_handle() if is_asynchronous(node) else scaled

    return scale


def is_asynchronous(node: IRCell) -> bool:
    """Whether the transfer is left running. Those inside a stage and those of the graph's outputs never are."""
    return bool(CompileFlag.async_comm) and isinstance(node, ObjectAdapter) and node.overlaps


def _emit_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def emit_adapter(self: FuncEmission, node: IRCell, *args: Any, **kwargs: Any) -> list[str]:
        if not isinstance(node, ObjectAdapter):
            codes: list[str] = original(self, node, *args, **kwargs)
            return codes
        codes = []
        for prim in node.prims:
            sent = prim.inputs()
            arguments = [self.tensor_name(sent[0]) if len(sent) == 1 else self.tuple_name(sent)]
            arguments += [f"{name}={value!r}" for name, value in prim.kwargs.items()]
            own = prim.call.replace("objcomm", "nnscaler.runtime.adapter")
            if hasattr(runtime_adapter, prim.call.split(".")[1]):
                # 0.9 has such a call of its own; who looks for it in the code finds what became of it.
                codes.append(f"# in place of {own}({', '.join(arguments)})")
            arguments += [f"channel={self.node_name(node)!r}", "forbid_grad=True"]
            results = self.return_name(prim.outputs())
            if node.handle is not None:
                arguments.append("async_op=True")
                results = self.tensor_name(node.handle)
            if CompileFlag.line_timer:
                codes.append(f"nnscaler.runtime.function.print_time({prim.signature!r})")
            codes.append(f"{results} = {prim.signature}({', '.join(arguments)})")
        return codes

    return emit_adapter


# ---- the schedule


def _gen(original: Callable[..., Any]) -> Callable[..., Any]:
    def gen(self: ScheduleCodeGen, device: int, *args: Any, **kwargs: Any) -> Any:
        self._objcomm_device = device % len(self.devices)
        self._objcomm_timelines = {}
        return original(self, device, *args, **kwargs)

    return gen


def _emit_node_08(original: Callable[..., Any]) -> Callable[..., Any]:
    def emit_node(self: ScheduleCodeGen, node: IRCell, force_no_grad: bool = False) -> list[str]:
        codes = original(self, node, force_no_grad)
        return _around(self, self.execplan, node, force_no_grad, codes)

    return emit_node


def _emit_node_09(original: Callable[..., Any]) -> Callable[..., Any]:
    def emit_node(
        self: ScheduleCodeGen, execplan: ExecutionPlan, node: IRCell, force_no_grad: bool = False
    ) -> list[str]:
        codes = original(self, execplan, node, force_no_grad)
        return _around(self, execplan, node, force_no_grad, codes)

    return emit_node


def _around(
    emitter: ScheduleCodeGen, execplan: ExecutionPlan, node: IRCell, infer: bool, codes: list[str]
) -> list[str]:
    """Add to the code of one node the waits in front of it and the releases behind it."""
    key = (id(execplan), infer)
    timeline = emitter._objcomm_timelines.get(key)
    if timeline is None:
        timeline = Timeline(execplan, emitter._objcomm_device, forward_only=infer, asynchronous=is_asynchronous)
        emitter._objcomm_timelines[key] = timeline
    if not timeline.moved:
        return codes
    adapter = unwrap(node)
    if isinstance(adapter, ObjectAdapter):
        codes = _adapter_call(emitter, execplan, node, infer, codes, timeline)
    event = timeline.at(node)
    before: list[str] = []
    for wait in event.waits_before:
        before += _wait(emitter, wait)
    after: list[str] = []
    for wait in event.waits_after:
        after += _wait(emitter, wait)
    if event.releases:
        after.append(emitter.emit_release(event.releases))
    return before + codes + after


def _wait(emitter: ScheduleCodeGen, wait: Any) -> list[str]:
    handle = emitter.tensor_name(wait.handle)
    result = f"{emitter.return_name(wait.objects)} = " if wait.objects else ""
    return [f"{result}{handle}.wait()", f"del {handle}"]


def _adapter_call(
    emitter: ScheduleCodeGen, execplan: ExecutionPlan, node: IRCell, infer: bool, codes: list[str], timeline: Timeline
) -> list[str]:
    """Call the adapter directly in training, and keep its handle where it is asynchronous.

    nnScaler's own way of calling it disables gradients in training as well; then the sender could not tell an object
    whose gradients would be lost.
    """
    adapter = unwrap(node)
    method = f"model.{emitter.node_name(adapter)}"
    arguments = emitter.tuple_name(node.inputs(), skip_attr=True, prefix_attr="model.")
    outputs = emitter.return_name(node.outputs(), skip_attr=True, prefix_attr="model.")
    call = f"nnscaler.runtime.executor.aexecute({method}, *{arguments}, requires_grad=False)"
    handle = timeline.handle(node)
    results = outputs if handle is None else emitter.tensor_name(handle)
    if execplan.graph.train and not infer:
        names = ", ".join(emitter.tensor_name(obj) for obj in node.inputs())
        rewritten = f"{results} = {method}({names})" if results != "_" else f"{method}({names})"
    else:
        rewritten = f"{results} = {call}"
    changed = copy.copy(codes)
    changed[changed.index(f"{outputs} = {call}")] = rewritten
    return changed
