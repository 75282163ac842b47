"""Policies that cut a model into stages and place them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nnscaler.graph import IRGraph
from nnscaler.graph.function.dimops import IRDimops
from nnscaler.graph.function.pyfunc import IRPyFunc
from nnscaler.graph.segment import IRSegment
from nnscaler.ir.operator import IRDataOperation, IRFwOperation
from nnscaler.policies import auto_multiref

Policy = Callable[[IRGraph, Any], IRGraph]


def reported(graph: IRGraph, cfg: Any) -> IRGraph:
    """The policy of the report: it takes the nodes by position, so the stages are cut in front of the look-up of the
    context and in front of the first addition, and a tensor without gradient crosses too."""
    dataloader, fc1, _gi1, _add1, fc2, _gi2, _add2, _loss = graph.nodes()[:8]
    graph.staging([fc1, fc2])
    stages = [s for s in graph.select(ntype=IRSegment, flatten=False) if s.isfw()]
    for device, part in enumerate(graph.replicate(dataloader, cfg.plan_ngpus)):
        graph.assign(part, device)
    for device, stage in enumerate(stages):
        for node in stage.nodes():
            graph.assign(node, device)
    return graph


@dataclass(frozen=True)
class Staged:
    """One stage in front of each of the given linear layers.

    Args:
        cuts: which linear layer starts each stage but the first.
        devices: of every stage.
        schedule: a name that ComputeConfig.apply_pipeline_scheduler knows, or ``None``.
        micros: micro-batches, with a schedule.
        split: partition linear layers over the devices of a stage, instead of replicating them.
        loaders: devices that read data; ``None``: all.
        single: names of operators that run on the first device of their stage only.
        recompute: put the operators of each stage into a recompute group.
    """

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    schedule: str | None = None
    micros: int = 1
    split: bool = False
    loaders: tuple[int, ...] | None = None
    single: tuple[str, ...] = ()
    recompute: bool = False

    def __call__(self, graph: IRGraph, cfg: Any) -> IRGraph:
        auto_multiref(graph)
        forward = [node for node in graph.nodes() if isinstance(node, IRFwOperation)]
        linears = [node for node in forward if node.name == "linear"]
        graph.staging([forward[0], *(linears[cut] for cut in self.cuts)])
        stages = [s for s in graph.select(ntype=IRSegment, flatten=False) if s.isfw()]
        assert len(stages) == len(self.devices)
        for stage, devices in zip(stages, self.devices, strict=True):
            if self.recompute:
                graph.recompute([node for node in stage.nodes() if node.name != "multiref"])
            for node in stage.nodes():
                if node.name != "multiref":
                    self._place(graph, node, devices)
        loaders = tuple(range(cfg.plan_ngpus)) if self.loaders is None else self.loaders
        for loader in graph.select(ntype=IRDataOperation):
            _spread(graph, graph.replicate(loader, times=len(loaders)), loaders)
        if self.schedule:
            cfg.apply_pipeline_scheduler(graph, len(stages), self.micros, self.schedule)
        return graph

    def _place(self, graph: IRGraph, node: Any, devices: Sequence[int]) -> None:
        if isinstance(node, IRPyFunc):
            return  # nnScaler replicates Python functions to all devices of their stage itself
        if node.name in self.single:
            graph.assign(node, devices[0])
        elif self.split and len(devices) > 1 and isinstance(node, IRDimops) and node.name == "linear":
            # The weight's first dimension: the output is gathered again.
            _spread(graph, graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=len(devices)), devices)
        else:
            _spread(graph, graph.replicate(node, times=len(devices)), devices)


@dataclass(frozen=True)
class Flat:
    """No stages: everything on all devices, but for the operators in ``single``, which run on device 0 alone."""

    single: tuple[str, ...] = ()

    def __call__(self, graph: IRGraph, cfg: Any) -> IRGraph:
        auto_multiref(graph)
        devices = tuple(range(cfg.plan_ngpus))
        for node in graph.select(ntype=(IRFwOperation, IRDataOperation)):
            if node.name == "multiref" or isinstance(node, IRPyFunc):
                continue
            if node.name in self.single:
                graph.assign(node, 0)
            else:
                _spread(graph, graph.replicate(node, times=len(devices)), devices)
        return graph


def _spread(graph: IRGraph, nodes: Sequence[Any], devices: Sequence[int]) -> None:
    for node, device in zip(nodes, devices, strict=True):
        graph.assign(node, device)
