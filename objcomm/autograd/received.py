"""The receiver's side: an object whose tensors collect gradients, and the way back for these."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..incoming import Incoming
from ..outgoing import Outgoing, send
from ..p2p import Device, expect, pair_of
from ..work import ObjectWork, advance, deadline_for, watch
from .mailbox import CHANNEL, about, message

_WHAT = "the gradients of an object that was received could not be sent back"
_WHEN_LATE = "the rank that sent the object has to call backward() on its handle"


class ReceivedObject:
    """An object that was received, or will be; its gradients can be sent back."""

    __slots__ = ("_incoming", "_leaves", "_obj", "_timeout")

    def __init__(self, incoming: Incoming, timeout: float | None) -> None:
        self._incoming = incoming
        self._timeout = timeout
        self._leaves: dict[int, torch.Tensor] | None = None
        self._obj: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the object is here, and return it; as :meth:`objcomm.ObjectWork.wait`."""
        incoming = self._incoming
        if self._leaves is None:
            self._obj = incoming.wait(deadline_for(incoming.pair, self._timeout if timeout is None else timeout))
            self._leaves = incoming.requiring_grad or {}
        return self._obj

    @property
    def obj(self) -> Any:
        """The object. Where it is still on its way, this waits for it."""
        return self.wait()

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors in the object that require grad, each once."""
        self.wait()
        return list((self._leaves or {}).values())

    def send_grads(self, timeout: float | None = None) -> None:
        """Send back what the tensors of the object have collected in their ``.grad``, and return when it was taken.

        A tensor without a gradient costs nothing. Every ``.grad`` is ``None`` afterwards: what another backward pass
        collects can be sent again, to a sender that retains its graph. The sender calls ``backward()`` as often.

        Raises:
            TransferTimeout: the sender of the object did not take them, naming its channel; the pair is closed.
            ObjcommError: as in :func:`objcomm.send_object`.
        """
        incoming = self._incoming
        deadline = deadline_for(incoming.pair, self._timeout if timeout is None else timeout)
        outgoing = self._post(timeout)
        with about(incoming.channel, _WHAT, _WHEN_LATE):
            outgoing.wait(deadline)

    def isend_grads(self) -> ObjectWork[None]:
        """The same without waiting. What was in ``.grad`` belongs to the handle that is returned."""
        watch(self._incoming.pair)
        return _Returning([self._post(None)], None, self._timeout, self._incoming.channel)

    def _post(self, timeout: float | None) -> Outgoing:
        self.wait(timeout)
        incoming, leaves = self._incoming, self._leaves or {}
        found = {number: leaf.grad for number, leaf in leaves.items() if leaf.grad is not None}
        by_number = {number: grad.detach() if grad.requires_grad else grad for number, grad in found.items()}
        deadline = deadline_for(incoming.pair, self._timeout if timeout is None else timeout)
        with about(incoming.channel, _WHAT, _WHEN_LATE):
            outgoing = send([incoming.pair], message(incoming.sequence, len(leaves), by_number), CHANNEL, deadline)[0]
        for number in found:
            leaves[number].grad = None
        return outgoing

    def __repr__(self) -> str:
        incoming = self._incoming
        where = f"from rank {incoming.pair.peer}, channel {incoming.channel!r}"
        state = "waiting" if self._leaves is None else f"{len(self._leaves)} tensors that require grad"
        return f"<ReceivedObject: {where}, {state}>"


class _Returning(ObjectWork[None]):
    """Gradients on their way; errors are about the object that they belong to."""

    __slots__ = ("_channel",)

    def __init__(self, moving: list[Outgoing], value: None, timeout: float | None, channel: str) -> None:
        super().__init__(moving, value, timeout)
        self._channel = channel

    def wait(self, timeout: float | None = None) -> None:
        with about(self._channel, _WHAT, _WHEN_LATE):
            super().wait(timeout)


def irecv_object(
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> ReceivedObject:
    """Post a receive, and return at once; as :func:`recv_object`. ``wait()`` or ``obj`` waits for the object."""
    pair = pair_of(src, group, group_src, "src")
    deadline_for(pair, timeout)
    incoming = expect(pair, channel, device, None, has_handle=True, track_grad=True)
    advance(incoming)
    return ReceivedObject(incoming, timeout)


def recv_object(
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> ReceivedObject:
    """Receive the next object of a rank that calls :func:`send_object`.

    Args:
        src, group, group_src, channel, device, timeout: as in :func:`objcomm.recv_object`.

    Returns:
        A handle. Its ``obj`` is the object: each tensor that required grad or had a history at the sender is a leaf
        that requires grad, whatever mode this is called in, and no other tensor is. Run the backward pass, then call
        ``send_grads()``.

    Raises:
        ObjcommError: as in :func:`objcomm.recv_object`.
    """
    pair = pair_of(src, group, group_src, "src")
    deadline_for(pair, timeout)
    received = ReceivedObject(expect(pair, channel, device, None, has_handle=False, track_grad=True), timeout)
    received.wait()
    return received
