"""``torch.fx.GraphModule``: its graph travels node by node, its parameters and buffers as those of any module.

torch's own way, running the generated code under a tracer at the receiver, loses the class of the module, what is not
reached by the trace and what nodes have been given; and where a tracer takes arguments it fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import DecodeError
from . import registry

_fx: Any = fx

# Made anew from the graph, or of use only while it is made.
_DERIVED = frozenset(("_graph", "_code", "_lineno_map", "_prologue_start", "shape_env"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass
class Reference:
    """A node, where the arguments of another one refer to it."""

    index: int


def _flatten(obj: Any) -> list[Any]:
    state = {name: value for name, value in vars(obj).items() if name not in _DERIVED}
    code = obj.graph.python_code("self").src
    return [_own_class(type(obj)), type(obj).__name__, state, _from_graph(obj.graph), code]


def _own_class(cls: type) -> type:
    """torch gives every graph module a class of its own; the class that a program knows is the one behind it."""
    return next(base for base in cls.__mro__ if not base.__qualname__.endswith(".GraphModuleImpl"))


def _from_graph(graph: Any) -> list[Any]:
    index = {node: number for number, node in enumerate(graph.nodes)}

    def plain(argument: Any) -> Any:
        if isinstance(argument, _fx.Node):
            return Reference(index[argument])
        if isinstance(argument, tuple):
            items = [plain(item) for item in argument]
            return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
        if isinstance(argument, list):
            return [plain(item) for item in argument]
        if isinstance(argument, dict):
            return {key: plain(value) for key, value in argument.items()}
        if isinstance(argument, slice):
            return slice(plain(argument.start), plain(argument.stop), plain(argument.step))
        return argument

    nodes = []
    for node in graph.nodes:
        meta = {name: value for name, value in node.meta.items() if _is_plain(value)}
        nodes.append([node.op, node.name, node.target, plain(node.args), plain(node.kwargs), node.type, meta])
    return [nodes, graph._tracer_cls, graph._tracer_extras, graph._codegen]


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(_is_plain(item) for item in (*value.keys(), *value.values()))
    return type(value) in _PLAIN


def _rebuild(parts: list[Any]) -> Any:
    cls, name, state, graph, code = parts
    module = cls.__new__(cls)
    type(module).__name__ = name
    vars(module).update(state)
    module.graph = _to_graph(graph)
    if module.code != code:
        raise DecodeError("the code of an fx graph is not what was sent", hint="run the same version of torch")
    return module


def _to_graph(parts: list[Any]) -> Any:
    described, tracer, extras, codegen = parts
    graph = _fx.Graph(tracer_cls=tracer, tracer_extras=extras)
    nodes: list[Any] = []

    def resolve(argument: Any) -> Any:
        if type(argument) is Reference:
            return nodes[argument.index]
        if isinstance(argument, tuple):
            items = [resolve(item) for item in argument]
            return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
        if type(argument) is list:
            return [resolve(item) for item in argument]
        if type(argument) is dict:
            return {key: resolve(value) for key, value in argument.items()}
        if type(argument) is slice:
            return slice(resolve(argument.start), resolve(argument.stop), resolve(argument.step))
        return argument

    for op, name, target, args, kwargs, type_expr, meta in described:
        node = graph.create_node(op, target, resolve(args), resolve(kwargs), name=name, type_expr=type_expr)
        node.meta.update(meta)
        nodes.append(node)
    graph.set_codegen(codegen)
    return graph


registry.register("fx.graph_module", lambda obj: True, _flatten, _rebuild, code=True, base=fx.GraphModule)
