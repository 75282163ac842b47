"""When, in the sequence of one device, a transfer is waited for and a moved object is let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nnscaler.execplan.execplan import ExecutionPlan, ExeReuseCell
from nnscaler.ir.cten import IRCell, IRObject

from .prims import ObjectAdapter, is_object


@dataclass(frozen=True)
class Wait:
    """A handle to wait for, and the objects that it gives: none where this device sent them."""

    handle: IRObject
    objects: tuple[IRObject, ...]


@dataclass
class Event:
    """What happens around one node."""

    waits_before: list[Wait] = field(default_factory=list)
    waits_after: list[Wait] = field(default_factory=list)
    releases: list[IRObject] = field(default_factory=list)


def unwrap(node: IRCell) -> IRCell:
    """The cell itself, where a micro-batch's use of it is given."""
    return node.cell if isinstance(node, ExeReuseCell) else node


class Timeline:
    """Waits and releases of one device, in the training step or, with ``forward_only``, in the inference step.

    A receiver waits where the object is first used. A sender waits where the same adapter sends again, but not before
    the receivers, in the one order of which all devices run subsequences, have begun to use the object: so the wait
    cannot close a circle, the sender computes meanwhile, and the number of objects in flight is bounded by the distance
    of the stages, not by the number of micro-batches.
    """

    def __init__(
        self,
        execplan: ExecutionPlan,
        device: int,
        *,
        forward_only: bool,
        asynchronous: Callable[[IRCell], bool],
    ) -> None:
        self._nodes = [node for node in execplan.seq(device) if node.isfw() or not forward_only]
        self._events: dict[int, Event] = {}
        self._handles: dict[int, IRObject] = {}
        adapters = [node for node in self._nodes if isinstance(unwrap(node), ObjectAdapter)]
        self.moved = {obj for node in adapters for obj in (*node.inputs(), *node.outputs())}
        if not adapters:
            return
        self._topology = [node for node in execplan._topo_seqs if node.isfw() or not forward_only]
        self._order = {int(node.cid): place for place, node in enumerate(self._topology)}
        self._used = {id(node): _used(node) for node in (*self._nodes, *self._topology)}
        for node in adapters:
            if asynchronous(unwrap(node)):
                self._wait_for(node)
        self._release(set(_objects(IRCell.get_objects_from_complex(execplan.outputs()))))

    def at(self, node: IRCell) -> Event:
        """What happens around a node."""
        return self._events.get(id(node)) or Event()

    def handle(self, node: IRCell) -> IRObject | None:
        """The handle of an asynchronous adapter."""
        return self._handles.get(id(node))

    def _event(self, node: IRCell) -> Event:
        return self._events.setdefault(id(node), Event())

    def _wait_for(self, node: IRCell) -> None:
        received = tuple(node.outputs())
        handle = unwrap(node).handle_for(received or tuple(node.inputs()))
        self._handles[id(node)] = handle
        later = self._nodes[self._nodes.index(node) + 1 :]
        if received:
            user = next((other for other in later if self._uses(other, received)), None)
        else:
            user = self._next_sending(node, later)
        wait = Wait(handle, received)
        if user is None:
            self._event(self._nodes[-1]).waits_after.append(wait)
        else:
            self._event(user).waits_before.append(wait)

    def _next_sending(self, node: IRCell, later: list[IRCell]) -> IRCell | None:
        """Where the same adapter sends again, and every receiver has begun to use what ``node`` sends."""
        start = self._order[int(node.cid)]
        whole = self._topology[start]
        objects = tuple(whole.outputs())
        taken = start
        for device in {device for obj in unwrap(whole).outputs() for device in obj.device}:
            places = (
                place
                for place in range(start + 1, len(self._topology))
                if device in self._topology[place].device and self._uses(self._topology[place], objects)
            )
            taken = max(taken, next(places, len(self._topology)))
        again = (other for other in later if unwrap(other).cid == unwrap(node).cid)
        return next((other for other in again if self._order[int(other.cid)] > taken), None)

    def _uses(self, node: IRCell, objects: Sequence[IRObject]) -> bool:
        return not self._used[id(node)].isdisjoint(objects)

    def _release(self, kept: set[IRObject]) -> None:
        last: dict[IRObject, IRCell] = {}
        for node in self._nodes:
            if node.isfw():
                for obj in _objects(IRCell.get_objects_from_complex([*node.inputs(), *node.outputs()])):
                    if obj in self.moved and obj not in kept:
                        last[obj] = node
        waited = {obj: node for node in self._nodes for wait in self.at(node).waits_after for obj in wait.objects}
        for obj, node in last.items():
            self._event(waited.get(obj, node)).releases.append(obj)


def _used(node: IRCell) -> set[IRObject]:
    return set(_objects(IRCell.get_objects_from_complex(node.inputs()))) if node.isfw() else set()


def _objects(values: Iterable[IRObject]) -> list[IRObject]:
    return [value for value in values if is_object(value)]
