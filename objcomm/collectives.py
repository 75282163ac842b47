"""Objects among several ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from . import debugging
from .errors import UsageError
from .outgoing import send
from .p2p import Device, irecv_object
from .pairs import pair_for
from .transport import rank_in
from .wire.frame import channel_name
from .work import ObjectWork, deadline_for, watch

T = TypeVar("T")


def broadcast_object(
    obj: T,
    src: int,
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> T | ObjectWork[T]:
    """Give one rank's object to several: every one of them makes the same call.

    The object is encoded once and sent to each receiver point to point, so that any ranks may take part without a group
    of their own.

    Args:
        obj: on ``src`` the object; elsewhere a placeholder, which is ignored.
        src: global rank that has the object.
        group: a process group that all of them belong to; ``None`` is the default group.
        ranks: global ranks that take part, ``src`` among them; ``None`` means all of the group.
        async_op: return a handle instead; its ``wait()`` gives the object.
        channel, device, timeout: as in :func:`objcomm.send_object` and :func:`objcomm.recv_object`.
        forbid_grad: as in :func:`objcomm.move_object`.

    Returns:
        On ``src`` the object itself, elsewhere what arrived.

    Raises:
        UsageError: this rank takes no part, or ``src`` does not.
        EncodeError, TrustError, LimitError: on ``src``, the object cannot be sent; every receiver gets a
            :class:`~objcomm.PeerError` (or the same ``LimitError``), and the pairs stay usable.
        ObjcommError: as in :func:`objcomm.send_object` and :func:`objcomm.recv_object`.

    Example::

        config = objcomm.broadcast_object(config if rank == 0 else None, src=0, ranks=[0, 2, 3])
    """
    rank = rank_in(group)
    members = get_process_group_ranks(group) if ranks is None else list(ranks)
    for needed, what in ((rank, "this rank"), (src, "src")):
        if needed not in members:
            raise UsageError(f"{what}, {needed}, is not among the ranks of this broadcast: {members}", rank=rank)
    channel_name(channel)
    if debugging.enabled:
        debugging.cross_check(group, members, "broadcast_object", f"src={src}, channel={channel!r}", timeout)
    work: ObjectWork[T]
    if rank != src:
        arriving = irecv_object(src, group=group, channel=channel, device=device, timeout=timeout)
        work = cast("ObjectWork[T]", arriving)
    else:
        pairs = [pair_for(group, member, None, "ranks") for member in dict.fromkeys(members) if member != src]
        if not pairs:
            return ObjectWork.over(obj) if async_op else obj
        for pair in pairs:
            watch(pair)
        deadline = deadline_for(pairs[0], timeout)
        outgoing = send(pairs, obj, channel, deadline, forbid_grad=forbid_grad and torch.is_grad_enabled())
        work = ObjectWork(outgoing, obj, timeout)
    return work if async_op else work.wait()
