"""Models with several submodules to parallelize, and the policies for them."""

from __future__ import annotations

from typing import Any

import torch
from nnscaler.graph import IRGraph
from nnscaler.graph.function.dimops import IRDimops
from nnscaler.graph.function.pyfunc import IRPyFunc
from nnscaler.ir.operator import IRFwOperation
from nnscaler.policies import auto_multiref
from torch import Tensor, nn

from .models import add_pieces, make_pieces

WIDTH = 4


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("scale", torch.randn(width), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x))) * self.scale + self.shift


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return torch.sigmoid(self.linear(x))


class Dropping(nn.Module):
    """Draws random numbers, also while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.linear(x))


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Dropping()
        self.second = Dropping()


class Two(nn.Module):
    """Two submodules of one class, and a head that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(x))).sum()


class Mixed(nn.Module):
    """Submodules of two classes, one of them twice, at some depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.ReLU(), Other()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Tied(nn.Module):
    """One submodule at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.middle = Block()
        self.last = self.first
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.last(self.middle(self.first(x)))).sum()


class Replicated:
    """Every operator on every device."""

    def __call__(self, graph: IRGraph, cfg: Any) -> IRGraph:
        auto_multiref(graph)
        devices = range(cfg.plan_ngpus)
        for node in graph.select(ntype=IRFwOperation):
            if node.name == "multiref" or isinstance(node, IRPyFunc):
                continue
            for part, device in zip(self._spread(graph, node, len(devices)), devices, strict=True):
                graph.assign(part, device)
        return graph

    def _spread(self, graph: IRGraph, node: Any, count: int) -> Any:
        return graph.replicate(node, times=count)


class Split(Replicated):
    """The first dimension of every weight is split over the devices."""

    def _spread(self, graph: IRGraph, node: Any, count: int) -> Any:
        if count > 1 and isinstance(node, IRDimops) and node.name == "linear":
            return graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=count)
        return super()._spread(graph, node, count)


class WithContext(nn.Module):
    """It is given a nested dict, and makes an object of it on one device that another uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, content: Any) -> Any:
        made = make_pieces(x, content)
        return add_pieces(self.linear(x), made) + content["content"]["bias"]


class Contexts(nn.Module):
    """Two submodules that objects move in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = WithContext()
        self.second = WithContext()

    def forward(self, x: Tensor, content: Any) -> Any:
        return self.second(self.first(x, content), content).sum()


class Nested:
    """Holds a class whose qualified name has a dot."""

    class Block(Block):
        pass
