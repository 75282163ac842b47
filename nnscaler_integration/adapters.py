"""Inserting object adapters into the graph, once nnScaler has inserted those of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nnscaler.graph.gener.gen import IRAdapterGener
from nnscaler.graph.segment import IRSegment
from nnscaler.ir.adapter.adapter import IRAdapter
from nnscaler.ir.cten import IRCell, IRObject

from .patching import Patch
from .plan import Step, Use, plan_transfers
from .prims import is_object, make_adapter


@dataclass
class _Place:
    """A place of the graph that uses objects."""

    node: IRCell | None  # None: the outputs of the graph
    index: int  # an adapter for it goes here
    use: Use
    objects: list[IRObject]


class _Group(NamedTuple):
    """Objects with one such key travel in one message."""

    place: int
    makers: tuple[int, ...]
    steps: tuple[Step, ...]


def insert_object_adapters(graph: IRSegment) -> None:
    """Insert what brings every object of this level of the graph to where it is used."""
    nodes = [node for node in graph.nodes() if node.isfw() and not isinstance(node, IRAdapter)]
    makers: dict[IRObject, list[IRCell]] = {}
    for node in nodes:
        for obj in _objects(node.oobjs()):
            makers.setdefault(obj, []).append(node)
    everywhere = set(_objects(graph.iobjs()))
    places = _places(graph, nodes)

    users_of: dict[IRObject, list[int]] = {}
    for number, place in enumerate(places):
        for obj in place.objects:
            users_of.setdefault(obj, []).append(number)

    groups: dict[_Group, list[IRObject]] = {}
    for obj, users in sorted(users_of.items(), key=lambda item: int(item[0].tid)):
        if obj in everywhere or obj not in makers:
            continue
        holders = {device for node in makers[obj] for device in node.device}
        for transfer in plan_transfers(holders, [places[number].use for number in users]):
            cells = tuple(dict.fromkeys(int(node.cid) for node in makers[obj]))
            groups.setdefault(_Group(users[transfer.before], cells, transfer.steps), []).append(obj)

    # From the back, so that the places in front keep their index.
    for group, objects in sorted(groups.items(), key=lambda item: item[0].place, reverse=True):
        place = places[group.place]
        adapter = make_adapter(objects, group.steps)
        adapter.receiver = place.node
        adapter.overlaps = isinstance(place.node, IRSegment)
        adapter.sender = next((node for node in makers[objects[0]] if isinstance(node, IRSegment)), None)
        graph.insert(adapter, place.index)


def _places(graph: IRSegment, nodes: list[IRCell]) -> list[_Place]:
    """Where objects are used, in the order in which the places run.

    A stage is scheduled on its own. All else in one level runs in one sequence.
    """
    staged = any(isinstance(node, IRSegment) for node in nodes)
    index = {node: position for position, node in enumerate(graph.nodes())}
    places = []
    for node in nodes:
        objects = _objects(node.iobjs())
        if objects:
            places.append(_Place(node, index[node], Use(tuple(node.device), isinstance(node, IRSegment)), objects))
    objects = _objects(graph.oobjs())
    if objects and nodes:
        places.append(_Place(None, index[nodes[-1]] + 1, Use(tuple(graph.device), staged), objects))
    return places


def _objects(values: tuple[Any, ...]) -> list[IRObject]:
    return [obj for obj in dict.fromkeys(values) if is_object(obj)]


def patches(version: str) -> list[Patch]:
    """What makes nnScaler's pass over the graph see objects too. The pass calls itself for every stage."""
    if version == "0.8":
        return [Patch(IRAdapterGener, "gen_activation", _after_tensors)]
    return [Patch(IRAdapterGener, "_gen_activation", _in_place_of_objects)]


def _after_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def gen_activation(graph: IRSegment, *args: Any, **kwargs: Any) -> IRSegment:
        graph = original(graph, *args, **kwargs)
        insert_object_adapters(graph)
        return graph

    return gen_activation


def _in_place_of_objects(original: Callable[..., Any]) -> Callable[..., Any]:
    def _gen_activation(graph: IRSegment, *args: Any, **kwargs: Any) -> Any:
        # 0.9 makes adapters for whatever this lists that is no tensor: left to the call below.
        graph.full_objects = graph.full_tensors
        try:
            result = original(graph, *args, **kwargs)
        finally:
            del graph.full_objects
        insert_object_adapters(graph)
        return result

    return _gen_activation
