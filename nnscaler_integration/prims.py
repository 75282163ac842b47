"""The graph nodes that carry objects between devices: two primitives and the adapter around them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from nnscaler.ir.adapter.adapter import IRAdapter
from nnscaler.ir.adapter.prim import CommPrim
from nnscaler.ir.cten import IRCell, IRObject, IRTensor

from .plan import Broadcast, Step

# What a value that is neither a tensor nor a container counts for in an estimate of the volume, in elements.
_SCALAR = 1


class ObjectPrim(CommPrim):  # type: ignore[misc]
    """Objects, any number of them in one message, from one device to one or several others.

    Its keyword arguments name devices as ``src``, ``dst`` and ``ranks``, which is what nnScaler shifts when a plan is
    repeated for data parallelism. It is no collective: no process group is made for it.
    """

    call: str

    def __init__(self, sent: Sequence[IRObject], received: Sequence[IRObject], **kwargs: Any) -> None:
        super().__init__(list(sent), list(received), **kwargs)
        self.signature = self.call

    def volume(self) -> int:
        """Elements that cross, judged by the example values; nothing is serialised for it."""
        held = self.inputs() or self.outputs()
        return max(1, len(self.outputs())) * sum(_volume(obj.value) for obj in held)


class ObjectMove(ObjectPrim):
    """To one device."""

    call = "objcomm.move_object"


class ObjectBroadcast(ObjectPrim):
    """To several devices."""

    call = "objcomm.broadcast_object"


class ObjectAdapter(IRAdapter):  # type: ignore[misc]
    """Brings objects from the devices that made them to the devices that use them. It has no backward.

    Attributes:
        sender: the stage that makes the objects; ``None`` where a dataloader or an operator does.
        receiver: the node that uses them; ``None`` where the outputs of the graph do.
        overlaps: the transfer may be left running until its receiver starts, where communication is asynchronous.
        handle: in the code of a rank with asynchronous communication, the object that stands for the transfer.
    """

    def __init__(self, inputs: Sequence[IRObject], outputs: Sequence[IRObject], prims: Sequence[ObjectPrim]) -> None:
        # The base class asks its values whether they are gradients, which objects cannot answer in 0.8.
        super().__init__([], [])
        self.sender: IRCell | None = None
        self.receiver: IRCell | None = None
        self.overlaps = False
        self.handle: IRObject | None = None
        self._forward = True
        self.set_values(inputs, outputs)
        self.device = sorted({device for obj in [*inputs, *outputs] for device in obj.device})
        self.prims = list(prims)

    def set_values(self, inputs: Sequence[IRObject], outputs: Sequence[IRObject]) -> None:
        """Replace inputs and outputs, keeping the device of each (the setters of a cell would overwrite it)."""
        self._inputs, self._outputs = list(inputs), list(outputs)
        for cached in (self.inputs, self.outputs, self.iobjs, self.oobjs):
            cached.cache_clear()

    def dispatch(self, devid: int, _mirror: bool = True) -> ObjectAdapter:
        part: ObjectAdapter | None = self._cached_dispatch.get(devid)
        if part is None:
            part = ObjectAdapter(
                [obj for obj in self.inputs() if devid in obj.device],
                [obj for obj in self.outputs() if devid in obj.device],
                [prim.dispatch(devid) for prim in self.prims if devid in prim.device],
            )
            part.name, part._id, part.op_context = self.name, self._id, self.op_context
            part.overlaps = self.overlaps
            self._cached_dispatch[devid] = part
        return part

    def with_handle(self) -> ObjectAdapter:
        """A copy for one rank whose only output is a handle that stands for the transfer."""
        part = copy.copy(self)
        part.handle = self.handle_for(self.outputs() or self.inputs())
        part.set_values(self.inputs(), [part.handle])
        return part

    def handle_for(self, objects: Sequence[IRObject]) -> IRObject:
        """What stands for one transfer of ``objects`` while it runs, under a name that is no other transfer's."""
        return IRObject(f"adapter{self.cid}_work", tid=objects[0].tid)


def at(obj: IRObject, device: int) -> IRObject:
    """The same object, placed on one device. A value's device is that of the cell it belongs to."""
    placed = copy.copy(obj)
    placed.cell = IRCell("object", "object", 0, 0)
    placed.cell.device = device
    return placed


def make_adapter(objects: Sequence[IRObject], steps: Iterable[Step]) -> ObjectAdapter:
    """The adapter that takes each of ``steps`` with all ``objects`` in one message."""
    inputs: list[IRObject] = []
    outputs: list[IRObject] = []
    prims: list[ObjectPrim] = []
    for step in steps:
        dsts = step.dsts if isinstance(step, Broadcast) else (step.dst,)
        sent = [at(obj, step.src) for obj in objects]
        received = [at(obj, dst) for dst in dsts for obj in objects]
        inputs += sent
        outputs += received
        if isinstance(step, Broadcast):
            prims.append(ObjectBroadcast(sent, received, src=step.src, ranks=sorted((step.src, *dsts))))
        else:
            prims.append(ObjectMove(sent, received, src=step.src, dst=step.dst))
    return ObjectAdapter(inputs, outputs, prims)


def is_object(value: Any) -> bool:
    """Whether a value of the graph is an object: no tensor, no attribute of the model, not a hole in a signature."""
    return (
        isinstance(value, IRObject)
        and not isinstance(value, IRTensor)
        and not value.is_attr()
        and value is not IRObject.missing
    )


def _volume(value: Any, depth: int = 8) -> int:
    if isinstance(value, IRTensor):
        return int(value.nelement())
    if isinstance(value, IRObject):
        return _volume(value.value, depth)
    if callable(getattr(value, "numel", None)):
        return int(value.numel())
    if depth and isinstance(value, dict):
        return sum(_volume(part, depth - 1) for part in value.values()) + _SCALAR
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return sum(_volume(part, depth - 1) for part in value) + _SCALAR
    return len(value) if isinstance(value, (str, bytes)) else _SCALAR
