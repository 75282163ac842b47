"""How the passes between graph and code treat adapters of objects: schedule, dispatch and grouping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnscaler.execplan.execplan import ExecutionPlan, ExeReuseCell
from nnscaler.execplan.planpass.grouping import Grouping
from nnscaler.graph.schedule.schedplan import Block, PlanBase, ScheduleDependency, SchedulePlan
from nnscaler.graph.segment import IRSegment
from nnscaler.ir.adapter.adapter import IRAdapter
from nnscaler.ir.operator import IRDataOperation

from .patching import Patch
from .prims import ObjectAdapter


def patches(version: str) -> list[Patch]:
    """What the passes of a version need. 0.9 dispatches objects by device itself, and does not group staged graphs."""
    common = [
        Patch(ScheduleDependency, "build", _build),
        Patch(SchedulePlan, "_place_adapters", _place_adapters),
        Patch(PlanBase, "_place_dataloader", _place_dataloader),
    ]
    if version == "0.8":
        return [*common, Patch(ExeReuseCell, "dispatch", _dispatch), Patch(Grouping, "group", _group)]
    return common


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Object adapters know their two stages. By data flow alone, one would belong to all stages that use the object."""

    def build(self: ScheduleDependency) -> None:
        nodes = self.graph._nodes
        everything = list(nodes)
        nodes[:] = [node for node in everything if not isinstance(node, ObjectAdapter)]
        try:
            original(self)
        finally:
            nodes[:] = everything
        self.adapters = [node for node in everything if isinstance(node, IRAdapter)]
        for adapter in self.adapters:
            if isinstance(adapter, ObjectAdapter):
                if adapter.sender is not None:
                    self.senders[adapter] = adapter.sender
                if isinstance(adapter.receiver, IRSegment):
                    self.recvers[adapter] = adapter.receiver

    return build


def _fed_by_dataloader(plan: SchedulePlan) -> dict[IRAdapter, list[IRDataOperation]]:
    """The adapters, of tensors too, that no stage feeds, and the dataloaders that do."""
    depends = plan._dependency
    fed = {}
    for adapter in depends.adapters:
        if adapter not in depends.senders:
            loaders = [loader for loader in depends.dataloaders if plan.graph.depends(loader, adapter)]
            if loaders:
                fed[adapter] = loaders
    return fed


def _place_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """nnScaler places an adapter right after the stage that feeds it, and knows no other feeder."""

    def _place_adapters(self: SchedulePlan) -> None:
        depends = self._dependency
        everything = depends.adapters
        fed = _fed_by_dataloader(self)
        depends.adapters = [adapter for adapter in everything if adapter not in fed]
        try:
            original(self)
        finally:
            depends.adapters = everything

    return _place_adapters


def _place_dataloader(original: Callable[..., Any]) -> Callable[..., Any]:
    """A dataloader that feeds other devices reads before the first stage, on any device, that waits for it.

    What it feeds leaves right after it. All ranks run subsequences of one order, so no two can wait for each other.
    """

    def _place_dataloader(self: SchedulePlan) -> None:
        original(self)
        fed = _fed_by_dataloader(self)
        for loader in dict.fromkeys(loader for loaders in fed.values() for loader in loaders):
            _read_early(self, loader)
        for adapter, loaders in fed.items():
            for mid in range(self.nmicros):
                reads = [block for block in self.all_blocks() if block.content in loaders and block.mid == mid]
                last = max(reads, key=self.start)
                step = self.start(last)
                row = self._step_blocks[step]
                placed = Block(adapter, mid, 1)
                # Blocks of one step run in the order of this list.
                row.insert(1 + max(position for position, block in enumerate(row) if block in reads), placed)
                self._block_start_step[placed] = step

    return _place_dataloader


def _read_early(plan: SchedulePlan, loader: IRDataOperation) -> None:
    """Move the reads of a dataloader in front of the first stage on any device that uses them, in order.

    The order of reads decides which micro-batch gets which sample.
    """
    users = [segment for segment in plan._dependency.segments if plan.graph.depends(loader, segment)]
    reads = [block for block in plan.all_blocks() if block.content is loader]
    step = plan.nsteps
    for read in sorted(reads, key=lambda block: int(block.mid), reverse=True):
        waiting = [block for block in plan.all_blocks() if block.content in users and block.mid == read.mid]
        step = min(step, *(plan.start(block) for block in (read, *waiting)))
        plan._step_blocks[plan.start(read)].remove(read)
        plan._step_blocks[step].insert(0, read)
        plan._block_start_step[read] = step


def _dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give each device the objects of an adapter that are placed on it; 0.8 would give it all of them."""

    def dispatch(self: ExeReuseCell, devid: int, _mirror: bool = True) -> ExeReuseCell:
        adapter = self.cell
        if not isinstance(adapter, ObjectAdapter):
            return original(self, devid, _mirror)
        if devid not in self._cached_dispatched:
            inputs = [own for own, at in zip(self.inputs(), adapter.inputs(), strict=True) if devid in at.device]
            outputs = [own for own, at in zip(self.outputs(), adapter.outputs(), strict=True) if devid in at.device]
            part = ExeReuseCell(adapter.dispatch(devid), inputs, outputs)
            part._id = self._id
            self._cached_dispatched[devid] = part
        return self._cached_dispatched[devid]

    return dispatch


def _group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep adapters between stages out of the groups of operators.

    0.8 takes a forward adapter without a backward for an operator and wraps it in a segment of its own. Between stages
    that segment is differentiated and never run backward, and on a stage with several devices it returns nothing.
    """

    def group(execplan: ExecutionPlan) -> Any:
        between: list[IRAdapter] = []
        if any(isinstance(node, IRSegment) for node in execplan.graph.nodes()):
            for device in execplan.devices():
                between += [node for node in execplan.seq(device) if _is_between_stages(node)]
        for node in between:
            # A node that has a mirror and is not differentiable ends a group; the mirror itself is never looked at.
            node._mirror = node
        try:
            return original(execplan)
        finally:
            for node in between:
                node._mirror = None

    return group


def _is_between_stages(node: Any) -> bool:
    return isinstance(node, IRAdapter) and node.isfw() and not node.differentiable and node.mirror is None
