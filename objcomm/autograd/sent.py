"""The sender's side: the handle of an object that left, and the backward pass that continues here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from ..codec import Encoded
from ..deadline import Deadline
from ..errors import ProtocolError, UsageError
from ..outgoing import send
from ..p2p import pair_of
from ..pair import Pair
from ..wire.frame import channel_name
from ..work import ObjectWork, deadline_for, watch
from .edges import Edge, edges_of
from .mailbox import Addressee, Gradients, about, mailbox_of


class SentObject(Addressee):
    """An object that was sent, and the ends of the graph at which its tensors left.

    A handle that is dropped loses nothing of the transfer; gradients that come back for it are dropped as well.
    """

    __slots__ = ("_count", "_edges", "_over", "_pair", "_timeout", "_work")

    def __init__(self, pair: Pair, obj: object, channel: str, timeout: float | None) -> None:
        super().__init__(channel)
        self._pair = pair
        self._timeout = timeout
        self._edges: dict[int, Edge] = {}
        self._count = 0
        self._over = False
        with mailbox_of(pair).adding(self) as known:
            outgoing = send([pair], obj, channel, deadline_for(pair, timeout), leaving=self._leave)
            known(outgoing[0].sequence)
        self._work: ObjectWork[None] = ObjectWork(outgoing, None, timeout)

    def _leave(self, encoded: Encoded) -> None:
        tensors = encoded.requiring_grad()
        self._count = len(tensors)
        self._edges = edges_of(tensors)

    def wait(self, timeout: float | None = None) -> None:
        """Block until the receiver has taken the object; as :meth:`objcomm.ObjectWork.wait`. The handle lets it go."""
        self._work.wait(timeout)

    def backward(self, *, retain_graph: bool = False, timeout: float | None = None) -> None:
        """Receive the gradients of the object, and run the backward pass from its tensors; see :func:`backward`."""
        backward([self], retain_graph=retain_graph, timeout=timeout)

    def _take(self, timeout: float | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Receive, and return what to run backward, with gradients: only where something came back."""
        if self._over:
            raise UsageError(
                "the backward pass of this object was run already, and its graph was freed",
                rank=self._pair.rank,
                peer=self._pair.peer,
                channel=self.channel,
                hint="pass retain_graph=True to all but the last",
            )
        deadline = deadline_for(self._pair, self._timeout if timeout is None else timeout)
        with about(self.channel, self._what(), self._when_late()):
            gradients = mailbox_of(self._pair).take(self._pair, self, deadline)
            self._finish_sending(deadline)
            return self._roots(gradients)

    def _finish_sending(self, deadline: Deadline) -> None:
        """What the peer computed with has arrived there: let go of the memory that it was sent from."""
        self._work.wait(deadline.remaining())

    def _roots(self, gradients: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if gradients.leaves != self._count:
            raise ProtocolError(
                f"{self._count} tensors of the object require grad, and {gradients.leaves} of what arrived",
                hint="a class in it is not rebuilt with the tensors that it was sent with",
            )
        roots = []
        for number, gradient in gradients.by_number.items():
            edge = self._edges.get(number)
            if edge is None:
                raise ProtocolError(f"a gradient came back for tensor {number}, which requires none")
            roots.append(edge.root(gradient))
        return roots

    def _clear(self, *, keep: bool) -> None:
        for edge in self._edges.values():
            edge.clear()
        if not keep:
            self._over = True
            self._edges = {}

    def _what(self) -> str:
        return "the gradients of an object that was sent did not come back"

    def _when_late(self) -> str:
        return (
            f"rank {self._pair.peer} has to take it with objcomm.autograd.recv_object(), run its backward pass and "
            "call send_grads()"
        )

    def __repr__(self) -> str:
        return f"<SentObject: to rank {self._pair.peer}, channel {self.channel!r}, {self._count} tensors with history>"


def backward(
    sent: Sequence[SentObject],
    tensors: Sequence[torch.Tensor] = (),
    grad_tensors: Sequence[torch.Tensor | None] | None = None,
    *,
    retain_graph: bool = False,
    timeout: float | None = None,
) -> None:
    """Receive the gradients of objects that were sent, and run one backward pass from their tensors and others.

    One pass goes through what they have in common once: an object sent to two ranks, a tensor that was sent and is
    used here as well. The sum is that of one process.

    Args:
        sent: handles of :func:`send_object` and :func:`isend_object`. For each, its receiver calls ``send_grads()``.
        tensors, grad_tensors: more to run backward from, as in :func:`torch.autograd.backward`.
        retain_graph: keep the graph, so that it can be run backward again when the receivers send gradients again.
        timeout: seconds for each of the objects; ``None`` takes that of its call, the configured one, or the group's.

    Raises:
        TransferTimeout: the gradients of an object did not come, naming its channel; the pair is closed.
        ProtocolError: what came is something else, or gradients that do not fit.
        PeerError: the receiver is gone, or could not send them.
        UsageError: the graph of an object was freed, or a handle is there twice.

    Example::

        left, right = (objcomm.autograd.isend_object(hidden, dst) for dst in (1, 2))
        objcomm.autograd.backward([left, right], [auxiliary_loss])
    """
    if len(set(map(id, sent))) < len(sent):
        raise UsageError("a handle is in the list twice", hint="run backward once for each time gradients are sent")
    roots = list(zip(tensors, [None] * len(tensors) if grad_tensors is None else grad_tensors, strict=True))
    keep = True
    try:
        for each in sent:
            roots += each._take(timeout)
        if roots:
            ends, gradients = zip(*roots, strict=True)
            torch.autograd.backward(list(ends), list(gradients), retain_graph=retain_graph)
        keep = retain_graph
    finally:
        for each in sent:
            each._clear(keep=keep)


def isend_object(
    obj: object,
    dst: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    channel: str = "",
    timeout: float | None = None,
) -> SentObject:
    """Start sending an object, and return at once; as :func:`send_object`.

    The tensors in ``obj`` must not change until the handle's ``wait()`` or ``backward()`` returned.
    """
    channel_name(channel)
    pair = pair_of(dst, group, group_dst, "dst")
    watch(pair)
    return SentObject(pair, obj, channel, timeout)


def send_object(
    obj: object,
    dst: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    channel: str = "",
    timeout: float | None = None,
) -> SentObject:
    """Send an object to one rank, and return when the receiver has taken it.

    The receiver calls :func:`recv_object`. Every tensor in the object that requires grad, as a leaf or with a history
    behind it, arrives as a leaf that requires grad; no other does.

    Args:
        obj, dst, group, group_dst, channel, timeout: as in :func:`objcomm.send_object`.

    Returns:
        A handle. Its ``backward()`` receives the gradients and continues the backward pass in this process. Gradients
        go to the graph as it is now: a tensor may be changed in place once it was sent.

    Raises:
        ObjcommError: as in :func:`objcomm.send_object`.

    Example::

        if rank == 0:
            sent = objcomm.autograd.send_object({"hidden": first(x), "lengths": [3, 1]}, dst=1)
            sent.backward()
        else:
            received = objcomm.autograd.recv_object(src=0)
            second(received.obj).backward()
            received.send_grads()
    """
    sent = isend_object(obj, dst, group=group, group_dst=group_dst, channel=channel, timeout=timeout)
    sent.wait()
    return sent
