"""Objects among several ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from . import debugging
from .direct import in_background, start, together
from .errors import UsageError
from .labels import label
from .p2p import Device, target_device
from .rollcall import Call
from .star import Star, gather, give, scatter, scattered
from .sweep import Sweep, all_gather, broadcast
from .team import Team
from .wire.frame import channel_name
from .work import ObjectWork


def broadcast_object(
    obj: object,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
    forbid_grad: bool = False,
) -> Any:
    """Give one rank's object to several: every one of them makes the same call.

    Args:
        obj: on ``src`` the object; elsewhere a placeholder, which is ignored.
        src: global rank that has the object.
        group: a process group that all of them belong to; ``None`` is the default group.
        group_src: rank of ``src`` in ``group``, instead of ``src``.
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
    team = Team(group, None if ranks is None else list(dict.fromkeys(ranks)))
    source = team.member(group, src, group_src, "src")
    target = target_device(device)
    if debugging.enabled:
        debugging.cross_check(team, "broadcast_object", timeout, src=source, channel=channel, async_op=async_op)
    forbid_grad = forbid_grad and torch.is_grad_enabled()
    if not team.pairs:
        return ObjectWork.over(obj) if async_op else obj
    if not async_op:
        with Call(team) as call:
            sweep = Sweep(call, source, _label(f"broadcast from {source}", channel), team.deadline(timeout), target)
            return broadcast(sweep, obj, forbid_grad)
    is_source = team.rank == source
    return in_background(
        start(
            team,
            dict.fromkeys(team.pairs, obj) if is_source else {},
            [] if is_source else [source],
            lambda objects: obj if is_source else objects[source],
            channel=_label(f"broadcast from {source}, async", channel),
            device=target,
            timeout=timeout,
            forbid_grad=forbid_grad,
        )
    )


def scatter_objects(
    objs: Sequence[object] | None,
    src: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> Any:
    """Give each rank its own object out of a list that one rank has: every one of them makes the same call.

    Args:
        objs: on ``src`` one object for each rank, in the order of ``ranks`` or of the group's ranks; elsewhere ignored.
        src: global rank that has the objects.
        group, group_src, ranks, async_op, channel, device, timeout: as in :func:`broadcast_object`.

    Returns:
        This rank's object; on ``src`` the one in ``objs`` itself.

    Raises:
        UsageError: ``objs`` has not one object for each rank (on ``src``; the others get a
            :class:`~objcomm.PeerError`), or as in :func:`broadcast_object`.
        ObjcommError: as in :func:`broadcast_object`; if one object cannot be sent, none is.

    Example::

        shard = objcomm.scatter_objects(shards if rank == 0 else None, src=0)
    """
    team = Team(group, ranks)
    source = team.member(group, src, group_src, "src")
    target = target_device(device)
    if debugging.enabled:
        debugging.cross_check(team, "scatter_objects", timeout, src=source, channel=channel, async_op=async_op)
    is_source = team.rank == source
    mine = _one_for_each(objs, team) if is_source else {}
    if not team.pairs:
        return _over(mine, team, async_op)
    if async_op:
        return in_background(
            start(
                team,
                mine if isinstance(mine, BaseException) else {peer: mine[peer] for peer in team.pairs if is_source},
                [] if is_source else [source],
                lambda objects: cast(dict[int, Any], mine if is_source else objects)[source],
                channel=_label(f"scatter from {source}, async", channel),
                device=target,
                timeout=timeout,
            )
        )
    with Call(team) as call:
        star = Star(call, source, _label(f"scatter from {source}", channel), team.deadline(timeout), target)
        if not is_source:
            return scattered(star)
        scatter(star, mine)
    return cast(dict[int, Any], mine)[source]


def gather_objects(
    obj: object,
    dst: int | None = None,
    *,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    ranks: Sequence[int] | None = None,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> list[Any] | None:
    """Bring every rank's object to one rank: every one of them makes the same call.

    Args:
        obj: this rank's object.
        dst: global rank that shall have them all.
        group_dst: rank of ``dst`` in ``group``, instead of ``dst``.
        group, ranks, channel, device, timeout: as in :func:`broadcast_object`.

    Returns:
        On ``dst`` a list in the order of ``ranks`` or of the group's ranks, in which its own object is ``obj`` itself;
        elsewhere ``None``, as soon as ``dst`` has everybody's.

    Raises:
        EncodeError, TrustError, LimitError: this rank's object cannot be sent; all others get a
            :class:`~objcomm.PeerError` that names this rank and the path.
        UsageError, ObjcommError: as in :func:`broadcast_object`.

    Example::

        losses = objcomm.gather_objects({"loss": loss, "step": step}, dst=0)
    """
    team = Team(group, ranks)
    target = team.member(group, dst, group_dst, "dst")
    placed = target_device(device)
    if debugging.enabled:
        debugging.cross_check(team, "gather_objects", timeout, dst=target, channel=channel)
    if not team.pairs:
        return [obj]
    with Call(team) as call:
        star = Star(call, target, _label(f"gather to {target}", channel), team.deadline(timeout), placed)
        if team.rank != target:
            give(star, obj)
            return None
        objects = {**gather(star), target: obj}
    return [objects[rank] for rank in team.ranks]


def all_gather_objects(
    obj: object,
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> Any:
    """Give every rank's object to every rank: every one of them makes the same call.

    Args:
        obj: this rank's object.
        group, ranks, async_op, channel, device, timeout: as in :func:`broadcast_object`.

    Returns:
        A list in the order of ``ranks`` or of the group's ranks, in which this rank's object is ``obj`` itself.

    Raises:
        EncodeError, TrustError, LimitError: this rank's object cannot be sent; all others get a
            :class:`~objcomm.PeerError` that names this rank and the path.
        UsageError, ObjcommError: as in :func:`broadcast_object`.

    Example::

        vocabularies = objcomm.all_gather_objects(vocabulary)
    """
    team = Team(group, ranks)
    target = target_device(device)
    if debugging.enabled:
        debugging.cross_check(team, "all_gather_objects", timeout, channel=channel, async_op=async_op)

    def in_order(objects: dict[int, Any]) -> list[Any]:
        return [obj if rank == team.rank else objects[rank] for rank in team.ranks]

    if not team.pairs:
        return ObjectWork.over([obj]) if async_op else [obj]
    if not async_op:
        with Call(team) as call:
            sweep = Sweep(call, min(team.ranks), _label("all_gather", channel), team.deadline(timeout), target)
            return in_order(all_gather(sweep, obj, target))
    return in_background(
        start(
            team,
            {peer: obj for peer, _ in team.from_here()},
            list(team.pairs),
            in_order,
            channel=_label("all_gather, async", channel),
            device=target,
            timeout=timeout,
        )
    )


def all_to_all_objects(
    objs: Sequence[object],
    *,
    group: ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    async_op: bool = False,
    channel: str = "",
    device: Device = None,
    timeout: float | None = None,
) -> Any:
    """Give each rank its own object from every rank: every one of them makes the same call.

    Args:
        objs: one object for each rank, in the order of ``ranks`` or of the group's ranks.
        group, ranks, async_op, channel, device, timeout: as in :func:`broadcast_object`.

    Returns:
        A list in the same order: what each rank had for this one. This rank's own is the one in ``objs`` itself.

    Raises:
        UsageError, ObjcommError: as in :func:`scatter_objects`.

    Example::

        tokens = objcomm.all_to_all_objects([routed[expert] for expert in range(world_size)])
    """
    team = Team(group, ranks)
    target = target_device(device)
    if debugging.enabled:
        debugging.cross_check(team, "all_to_all_objects", timeout, channel=channel, async_op=async_op)
    mine = _one_for_each(objs, team)
    if not team.pairs:
        return _over({team.rank: mine if isinstance(mine, BaseException) else [mine[team.rank]]}, team, async_op)
    sends = mine if isinstance(mine, BaseException) else {peer: mine[peer] for peer, _ in team.from_here()}
    channel = _label("all_to_all", channel)

    def in_order(objects: dict[int, Any]) -> list[Any]:
        return [{**cast(dict[int, Any], mine), **objects}[rank] for rank in team.ranks]

    if async_op:
        sources = list(team.pairs)
        return in_background(start(team, sends, sources, in_order, channel=channel, device=target, timeout=timeout))
    with Call(team) as call:
        return together(call, sends, in_order, channel=channel, device=target, timeout=timeout)


def _over(mine: dict[int, Any] | BaseException, team: Team, async_op: bool) -> Any:
    """The outcome of a call of one rank alone."""
    if isinstance(mine, BaseException):
        raise mine
    value = mine[team.rank]
    if isinstance(value, BaseException):
        raise value
    return ObjectWork.over(value) if async_op else value


def _one_for_each(objs: Sequence[object] | None, team: Team) -> dict[int, Any] | UsageError:
    """The objects by rank, or what is wrong with them: the others are waiting for them, and must be told."""
    if not isinstance(objs, Sequence) or len(objs) != len(team.ranks):
        what = f"one of {len(objs)}" if isinstance(objs, Sequence) else type(objs).__name__
        return UsageError(f"a sequence of {len(team.ranks)} objects is needed, not {what}", rank=team.rank)
    return dict(zip(team.ranks, objs, strict=True))


def _label(call: str, channel: str) -> str:
    channel_name(channel)  # for the error that names it as the program gave it
    return label(call, channel)
