"""Process groups: which rank is meant, what a group runs on, and whether it still exists.

The one place that looks into torch.distributed's own tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import UsageError


class Peer(NamedTuple):
    """One other rank of a group.

    Attributes:
        group: the process group itself, never ``None``.
        rank: the peer's global rank.
        group_rank: the peer's rank in ``group``.
    """

    group: dist.ProcessGroup
    rank: int
    group_rank: int


def resolve(group: dist.ProcessGroup | None, rank: int | None, group_rank: int | None, name: str = "peer") -> Peer:
    """The peer that a call means. ``name`` is that of the call's argument: ``"src"``, ``"dst"``, ``"peer"``.

    Raises:
        UsageError: there is no process group, this rank is not in it, the peer is not in it or is this rank
            itself, or not exactly one of ``rank`` and ``group_rank`` is given.
    """
    pg = existing(group)
    return Peer(pg, *_find(pg, rank, group_rank, name))


def standing(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``, or the default group, if there is such a group and it has not been destroyed; else ``None``."""
    world = c10d._world
    pg = world.default_pg if group is None else group
    try:
        return pg if pg in world.pg_map else None
    except TypeError:  # not hashable, so no group
        return None


def existing(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default group, if it exists and this rank is in it.

    Raises:
        UsageError: otherwise.
    """
    if not dist.is_initialized():
        raise UsageError(
            "there is no process group",
            hint="call torch.distributed.init_process_group() first",
        )
    pg: Any = c10d.GroupMember.WORLD if group is None else group
    if pg is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not in the group", rank=dist.get_rank(), hint="only its members may call")
    if not isinstance(pg, dist.ProcessGroup):
        raise UsageError(f"group must be a process group, not {type(pg).__name__}", rank=dist.get_rank())
    if pg not in c10d._world.pg_map:
        raise UsageError("the process group has been destroyed", rank=dist.get_rank())
    if pg.rank() < 0:
        raise UsageError("this rank is not in the group", rank=dist.get_rank(), hint="only its members may call")
    return pg


def rank_in(group: dist.ProcessGroup | None) -> int:
    """The global rank of this process, which must be in ``group``.

    Raises:
        UsageError: it is not, or there is no such group.
    """
    existing(group)
    return dist.get_rank()


def exists(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has not been destroyed."""
    return group is not None and group in c10d._world.pg_map


def global_rank(group: dist.ProcessGroup, group_rank: int) -> int:
    return dist.get_global_rank(group, group_rank)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store of this group alone."""
    return c10d._get_process_group_store(group)


def name_of(group: dist.ProcessGroup) -> str:
    """The name of the group, the same on all of its ranks."""
    return c10d._world.pg_names.get(group, "")


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend's name by device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device.strip(): backend.strip() for device, backend in pairs}


def backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """The object that does the work for a device type, in front of which no wrapper stands.

    A backend written in Python is the group itself.
    """
    try:
        return group._get_backend(torch.device(device_type))
    except RuntimeError:
        return group


def gloo_of(group: dist.ProcessGroup) -> Any | None:
    """The group's gloo, if it has one. It moves CPU memory even where it is registered for another device."""
    kinds = [kind for kind, name in backends_of(group).items() if name == "gloo"]
    return backend_of(group, "cpu" if "cpu" in kinds else kinds[0]) if kinds else None


def timeout_of(group: dist.ProcessGroup, device_type: str) -> float:
    """The group's time-out in seconds."""
    options = getattr(backend_of(group, device_type), "options", None)
    timeout = getattr(options, "_timeout", None)
    if timeout is None:
        timeout = c10d._get_default_timeout(dist.Backend(backends_of(group)[device_type]))
    return float(timeout.total_seconds())


def _find(group: dist.ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> tuple[int, int]:
    me = dist.get_rank()
    members = dist.get_process_group_ranks(group)
    if (rank is None) == (group_rank is None):
        given = "neither is given" if rank is None else "both are given"
        raise UsageError(f"exactly one of {name} and group_{name} must name the peer, and {given}", rank=me)
    argument = f"group_{name}" if rank is None else name
    value = group_rank if rank is None else rank
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{argument} must be a rank, an int, not {type(value).__name__}", rank=me)
    if rank is not None and value not in members:
        raise UsageError(f"{name}={rank} is not in the group, whose global ranks are {_short(members)}", rank=me)
    if rank is None and not 0 <= value < len(members):
        raise UsageError(f"group_{name}={value} is no rank of a group of {len(members)}", rank=me)
    found = value if rank is not None else dist.get_global_rank(group, value)
    if found == me:
        raise UsageError(
            f"{argument}={value} is this rank itself",
            rank=me,
            hint="keep the object; nothing needs to move",
        )
    return found, dist.get_group_rank(group, found)


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"{ranks[:8]} ... {ranks[-1]} ({len(ranks)} of them)"
