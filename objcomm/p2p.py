"""Objects from one rank to another: blocking, non-blocking, both ways at once, and one line for both ends."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from .errors import EncodeError, LimitError, TrustError, UsageError
from .incoming import Incoming
from .outgoing import send
from .pair import Pair
from .pairs import pair_for, refuse_fakes
from .transport import rank_in
from .wire.frame import channel_name
from .work import ObjectWork, advance, deadline_for, watch

T = TypeVar("T")
_C: Any = torch._C
Device = torch.device | str | int | None


def send_object(
    obj: object,
    dst: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    channel: str = "",
    timeout: float | None = None,
) -> None:
    """Send any Python object to one rank, and return when its memory is no longer needed.

    Tensors travel as raw bytes, from their own memory into the memory where they will live; everything else goes in one
    small head. The receiver calls :func:`recv_object` and needs to know nothing of sizes or types. Between hosts it has
    taken the object by then; within one host a small object may still wait for it.

    Args:
        obj: nested containers of tensors of any shape and dtype, numbers, strings, arrays, user objects.
        dst: global rank of the receiver.
        group: a process group that both ranks belong to; ``None`` is the default group.
        group_dst: rank of the receiver in ``group``, instead of ``dst``.
        channel: a name that both ends must give alike; it catches calls that are out of step.
        timeout: seconds; ``None`` takes the configured time-out, else the group's.

    Raises:
        EncodeError: the object cannot be sent, naming the path in it. Nothing left; the receiver gets a
            :class:`~objcomm.PeerError` at once, and the pair stays usable.
        TrustError: the same, for what restricted trust refuses.
        LimitError: the message is larger than ``max_bytes``, on both ends; the pair stays usable.
        TransferTimeout: the receiver did not take it in time; the pair is closed.
        PeerError: the receiver is gone.
        ProtocolError: the receiver has other settings or another version.
        UsageError: no such rank, this rank itself, or this rank is not in the group.

    Example (see also :func:`move_object`, one line for both ends)::

        if rank == 0:
            objcomm.send_object({"hidden": hidden, "lengths": [3, 1, 4]}, dst=1)
        else:
            context = objcomm.recv_object(src=0)
    """
    pair = pair_of(dst, group, group_dst, "dst")
    deadline = deadline_for(pair, timeout)
    send([pair], obj, channel, deadline)[0].wait(deadline)


def recv_object(
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    channel: str = "",
    device: Device = None,
    into: object | None = None,
    timeout: float | None = None,
) -> Any:
    """Receive the next object that a rank sends here.

    Args:
        src: global rank of the sender.
        group: as in :func:`send_object`.
        group_src: rank of the sender in ``group``, instead of ``src``.
        channel: the name that the sender gives.
        device: where tensors shall live. ``None``: a CPU tensor stays on the CPU, an accelerator tensor lands on *this*
            rank's accelerator, whatever its index on the sender. ``"cpu"`` brings everything to the CPU.
        into: an object of the same structure whose tensors are filled in place; the result holds them.
        timeout: seconds; ``None`` takes the configured time-out, else the group's.

    Returns:
        What was sent: same types, values, dtypes, layouts and sharing of tensors.

    Raises:
        PeerError: the sender could not encode its object (naming its path there), has left, or died.
        LimitError: the message is larger than ``max_bytes``.
        ProtocolError: another channel, version or setting, or a damaged frame.
        DecodeError: it cannot be rebuilt here, such as a class that cannot be imported, or does not fit ``into``;
            the next message arrives.
        TrustError: restricted trust refuses what came; nothing of it was unpickled; the next message arrives.
        TransferTimeout: nothing came in time; the pair is closed.
        UsageError: as in :func:`send_object`.
    """
    pair = pair_of(src, group, group_src, "src")
    deadline = deadline_for(pair, timeout)
    return expect(pair, channel, device, into, has_handle=False).wait(deadline)


def isend_object(
    obj: T,
    dst: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    channel: str = "",
    timeout: float | None = None,
) -> ObjectWork[T]:
    """Start sending, and return a handle at once.

    The tensors in ``obj`` must not change until the handle's ``wait()`` returned: their own memory is being read.
    Arguments and errors as in :func:`send_object`; an object that cannot be sent raises here, all else in ``wait()``.
    """
    pair = pair_of(dst, group, group_dst, "dst")
    watch(pair)
    return ObjectWork(send([pair], obj, channel, deadline_for(pair, timeout)), obj, timeout)


def irecv_object(
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    channel: str = "",
    device: Device = None,
    into: object | None = None,
    timeout: float | None = None,
) -> ObjectWork[Any]:
    """Post a receive, and return a handle whose ``wait()`` gives the object.

    Several may be posted ahead; objects come in the order of the calls, whichever handle is waited for first.
    Arguments and errors as in :func:`recv_object`; the errors are raised in ``wait()``.
    """
    pair = pair_of(src, group, group_src, "src")
    deadline_for(pair, timeout)  # a wrong time-out is told here, before anything is posted
    incoming = expect(pair, channel, device, into, has_handle=True)
    advance(incoming)
    return ObjectWork(incoming, None, timeout)


def exchange_objects(
    obj: object,
    peer: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_peer: int | None = None,
    channel: str = "",
    device: Device = None,
    into: object | None = None,
    timeout: float | None = None,
) -> Any:
    """Send an object to a rank and receive one from it, both at once. It cannot deadlock, however large they are.

    Returns the peer's object. Arguments and errors as in :func:`send_object` and :func:`recv_object`; where this rank's
    object cannot be sent, the peer's is still taken, so that the pair stays usable.
    """
    pair = pair_of(peer, group, group_peer, "peer")
    deadline = deadline_for(pair, timeout)
    incoming = expect(pair, channel, device, into, has_handle=False)
    try:
        outgoing = send([pair], obj, channel, deadline)[0]
    except (EncodeError, TrustError, LimitError) as error:
        try:
            incoming.wait(deadline)
        finally:
            raise error
    try:
        return incoming.wait(deadline)
    finally:
        outgoing.wait(deadline)


def move_object(
    obj: object,
    src: int,
    dst: int,
    *,
    async_op: bool = False,
    group: ProcessGroup | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> Any:
    """Move an object from one rank to another: the same line on both.

    Args:
        obj: on ``src`` the object; on ``dst`` a placeholder, which is ignored.
        src: global rank that has the object.
        dst: global rank that shall have it.
        async_op: return a handle instead; its ``wait()`` gives the object.
        group, channel, device, timeout: as in :func:`send_object` and :func:`recv_object`.
        forbid_grad: refuse to send a tensor that requires grad, wherever in the object it is, while gradients are being
            recorded: it would arrive without its history, and its gradient would be lost without a word.

    Returns:
        On ``src`` the object itself, on ``dst`` what arrived. Where both are this rank, the object itself.

    Raises:
        UsageError: this rank is neither ``src`` nor ``dst``.
        ObjcommError: as in :func:`send_object` and :func:`recv_object`.

    Example::

        context = objcomm.move_object(context if rank == 0 else None, 0, 1, channel="context")
    """
    rank = rank_in(group)
    if rank not in (src, dst):
        raise UsageError(f"rank {rank} takes no part in a move from rank {src} to rank {dst}", rank=rank)
    if src == dst:
        return ObjectWork.over(obj) if async_op else obj
    if rank == src:
        pair = pair_of(dst, group, None, "dst")
        if async_op:
            watch(pair)
        deadline = deadline_for(pair, timeout)
        outgoing = send([pair], obj, channel, deadline, forbid_grad=forbid_grad and torch.is_grad_enabled())
        if async_op:
            return ObjectWork(outgoing, obj, timeout)
        outgoing[0].wait(deadline)
        return obj
    if async_op:
        return irecv_object(src, group=group, channel=channel, device=device, timeout=timeout)
    return recv_object(src, group=group, channel=channel, device=device, timeout=timeout)


def pair_of(rank: int | None, group: ProcessGroup | None, group_rank: int | None, name: str) -> Pair:
    """The pair that a call means by ``rank`` or ``group_rank``; ``name`` is what it calls the former."""
    if _C._len_torch_dispatch_stack():
        refuse_fakes()
    return pair_for(group, rank, group_rank, name)


def expect(
    pair: Pair, channel: str, device: Device, into: object | None, *, has_handle: bool, track_grad: bool = False
) -> Incoming:
    """Queue a receive, its arguments checked."""
    channel_name(channel)
    incoming = Incoming(pair, channel, target_device(device), into, has_handle=has_handle, track_grad=track_grad)
    pair.expect(incoming)
    return incoming


def target_device(device: Device) -> torch.device | None:
    """Where tensors shall live, checked before anything is posted."""
    if device is None:
        return None
    try:
        target = torch.device(device)
        if target.type != "cpu":
            torch.empty(0, device=target)
    except Exception as error:
        raise UsageError(f"device={device!r} cannot be used here: {error}") from error
    if target.type == "meta":
        raise UsageError("device='meta' holds no data", hint="receive on 'cpu' and move what you need")
    return target
