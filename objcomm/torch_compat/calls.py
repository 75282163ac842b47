"""The six calls. Signatures are those of torch 2.14; earlier ones are beginnings of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_global_rank, get_rank

from ..codec import encode, parse
from ..collectives import all_gather_objects, broadcast_object, gather_objects, scatter_objects
from ..config import settings, trust_here
from ..errors import UsageError
from ..p2p import recv_object, send_object
from .groups import check_device, rank_given, root_of, served, torchs_own
from .mistakes import AsTorch

# Calls of this kind meet only each other: one that meets another call of objcomm is told so by both names.
CHANNEL = "torch.distributed"

_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes))


def send_object_list(
    object_list: Sequence[object],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """As ``torch.distributed.send_object_list``: send a list of objects, as one message.

    Args:
        object_list: objects that pickle takes, tensors among them.
        dst, group, group_dst: the receiver, as in torch.
        device: not needed; accepted.
        use_batch: not needed; accepted.
        weights_only: refuse whatever would have to be pickled (restricted trust).

    Raises:
        ValueError: (as :class:`~objcomm.UsageError`) the list is empty, there is no such rank, or it is this one.
        ObjcommError: as in :func:`objcomm.send_object`, and of the type that pickle raises.

    Example::

        if rank == 0:
            send_object_list(["a", {"x": torch.ones(3)}], dst=1)
        else:
            objects = [None, None]
            recv_object_list(objects, src=0)
    """
    pg = served(group)
    if pg is None:
        torchs_own(
            "send_object_list",
            object_list,
            dst,
            group,
            device,
            group_dst=group_dst,
            use_batch=use_batch,
            weights_only=weights_only,
        )
        return
    check_device(device)
    objects = list(object_list)
    with AsTorch(weights_only):
        send_object(objects, rank_given(dst), group=pg, group_dst=rank_given(group_dst), channel=CHANNEL)
    _check_not_empty(objects, get_rank())


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """As ``torch.distributed.recv_object_list``: receive a list of objects into a list of that length.

    Args:
        object_list: its items are replaced by what arrives.
        src, group, group_src: the sender, as in torch, which must be named: there is no receiving from any source.
        device, use_batch: not needed; accepted. Tensors land as in :func:`objcomm.recv_object`.
        weights_only: refuse whatever was pickled (restricted trust).

    Returns:
        The global rank of the sender; -1 on a rank outside of the group, after a warning.

    Raises:
        ValueError: (as :class:`~objcomm.UsageError`) the lengths differ, no rank is named, or it is this one.
        ObjcommError: as in :func:`objcomm.recv_object`, and of the type that pickle raises.
    """
    pg = served(group)
    if pg is None:
        rank: int = torchs_own(
            "recv_object_list",
            object_list,
            src,
            group,
            device,
            group_src=group_src,
            use_batch=use_batch,
            weights_only=weights_only,
        )
        return rank
    check_device(device)
    if src is None and group_src is None:
        raise UsageError(
            "src or group_src must name the sender: objects cannot be received from any source",
            rank=get_rank(),
            hint="let the sender be known, or gather",
        )
    source, group_source = rank_given(src), rank_given(group_src)
    with AsTorch(weights_only):
        received = recv_object(source, group=pg, group_src=group_source, channel=CHANNEL)
    if source is None:
        assert group_source is not None
        source = get_global_rank(pg, group_source)
    _fill(object_list, received, source)
    return source


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """As ``torch.distributed.broadcast_object_list``: give one rank's list of objects to all of the group.

    Args:
        object_list: on the source the objects; elsewhere a list of that length whose items are replaced.
        src, group, group_src: the source, as in torch; global rank 0 where neither is given.
        device: not needed; accepted. Tensors land as in :func:`objcomm.broadcast_object`.
        weights_only: refuse whatever would have to be pickled (restricted trust).

    Raises:
        ValueError: (as :class:`~objcomm.UsageError`) the lengths differ, the list is empty, or there is no such rank.
        ObjcommError: as in :func:`objcomm.broadcast_object`, and of the type that pickle raises.
    """
    pg = served(group)
    if pg is None:
        torchs_own(
            "broadcast_object_list", object_list, src, group, device, group_src=group_src, weights_only=weights_only
        )
        return
    check_device(device)
    source = root_of(pg, src, group_src, "src")
    is_source = get_rank() == source
    objects = list(object_list) if is_source else []
    with AsTorch(weights_only):
        received: Any = broadcast_object(objects, source, group=pg, channel=CHANNEL)
    if is_source:
        _check_not_empty(objects, source)
    else:
        _fill(object_list, received, source)


def all_gather_object(
    object_list: list[Any], obj: Any, group: ProcessGroup | None = None, weights_only: bool = False
) -> None:
    """As ``torch.distributed.all_gather_object``: every rank's object on every rank.

    Args:
        object_list: its items are replaced by the objects, in the order of the group's ranks; this rank's is a copy.
        obj: this rank's object.
        group: as in torch.
        weights_only: refuse whatever would have to be pickled (restricted trust).

    Raises:
        IndexError: the list is too short.
        ObjcommError: as in :func:`objcomm.all_gather_objects`, and of the type that pickle raises.
    """
    pg = served(group)
    if pg is None:
        torchs_own("all_gather_object", object_list, obj, group, weights_only=weights_only)
        return
    with AsTorch(weights_only):
        gathered = all_gather_objects(obj, group=pg, channel=CHANNEL)
        gathered[pg.rank()] = _copy_of(obj)
    for index, each in enumerate(gathered):
        object_list[index] = each


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """As ``torch.distributed.gather_object``: every rank's object on one rank.

    Args:
        obj: this rank's object.
        object_gather_list: on the destination a list whose items are replaced by the objects, in the order of the
            group's ranks, of which its own is a copy; elsewhere None.
        dst, group, group_dst: the destination, as in torch; global rank 0 where neither is given.
        weights_only: refuse whatever would have to be pickled (restricted trust).

    Raises:
        ValueError: (as :class:`~objcomm.UsageError`) a list is missing on the destination or given elsewhere, or there
            is no such rank.
        IndexError: the list is too short.
        ObjcommError: as in :func:`objcomm.gather_objects`, and of the type that pickle raises.
    """
    pg = served(group)
    if pg is None:
        torchs_own("gather_object", obj, object_gather_list, dst, group, group_dst=group_dst, weights_only=weights_only)
        return
    target = root_of(pg, dst, group_dst, "dst")
    is_target = get_rank() == target
    if is_target and not object_gather_list:
        raise UsageError("object_gather_list must be given on the destination", rank=target)
    if object_gather_list and not is_target:
        raise UsageError(f"object_gather_list must not be given: rank {target} is the destination", rank=get_rank())
    with AsTorch(weights_only):
        gathered = gather_objects(obj, target, group=pg, channel=CHANNEL)
        if gathered is not None:
            gathered[pg.rank()] = _copy_of(obj)
    if gathered is not None:
        assert object_gather_list is not None
        for index, each in enumerate(gathered):
            object_gather_list[index] = each


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[object] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """As ``torch.distributed.scatter_object_list``: give each rank its own object of one rank's list.

    Args:
        scatter_object_output_list: its first item is replaced by this rank's object; on the source, by a copy of it.
        scatter_object_input_list: on the source one object for each rank; elsewhere ignored.
        src, group, group_src: the source, as in torch; global rank 0 where neither is given.
        weights_only: refuse whatever would have to be pickled (restricted trust).

    Raises:
        ValueError: (as :class:`~objcomm.UsageError`) one of the lists is none or of a wrong length, or there is no such
            rank.
        ObjcommError: as in :func:`objcomm.scatter_objects`, and of the type that pickle raises.
    """
    pg = served(group)
    if pg is None:
        torchs_own(
            "scatter_object_list",
            scatter_object_output_list,
            scatter_object_input_list,
            src,
            group,
            group_src=group_src,
            weights_only=weights_only,
        )
        return
    source = root_of(pg, src, group_src, "src")
    if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
        # The words are torch's: its own tests look for them.
        raise UsageError(
            "Expected argument scatter_object_output_list to be a list of size at least 1.", rank=get_rank()
        )
    with AsTorch(weights_only):
        mine = scatter_objects(scatter_object_input_list, source, group=pg, channel=CHANNEL)
        if get_rank() == source:
            mine = _copy_of(mine)
    scatter_object_output_list[0] = mine


def _fill(object_list: list[Any], received: list[Any], source: int) -> None:
    _check_not_empty(received, source)
    if len(received) != len(object_list):
        raise UsageError(
            f"object_list has {len(object_list)} items, and rank {source} has sent {len(received)}",
            rank=get_rank(),
            hint="give lists of one length on all ranks",
        )
    for index, each in enumerate(received):
        object_list[index] = each


def _check_not_empty(objects: Sequence[object], source: int) -> None:
    """torch refuses an empty list where it is sent; so that nobody waits for what does not come, it is sent here."""
    if not objects:
        raise UsageError(f"object_list of rank {source} is empty", rank=get_rank())


def _copy_of(obj: Any) -> Any:
    """This rank's own object as any other rank gets it: torch unpickles it too, so nothing of it is shared."""
    if type(obj) in _IMMUTABLE:
        return obj
    encoded = encode(obj, trust=trust_here())
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8, device="cpu")
    encoded.write_inline(inline)
    plan = parse(
        encoded.skeleton,
        inline_bytes=encoded.inline_bytes,
        segments=[(segment.numel(), not segment.is_cpu) for segment in encoded.segments],
        trust=trust_here(),
        max_bytes=settings().max_bytes,
    )
    return plan.build(inline, [segment.clone() for segment in encoded.segments])
