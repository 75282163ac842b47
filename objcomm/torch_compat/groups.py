"""Which group and rank a call of torch's means, and whether objcomm or torch itself answers it."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import UsageError
from ..transport.groups import backends_of, existing

NAMES = (
    "send_object_list",
    "recv_object_list",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
)

# Groups of one process that only look like groups: nothing crosses them.
_UNREAL = frozenset(("fake", "threaded"))

_torchs: dict[str, Callable[..., Any]] = {name: inspect.unwrap(getattr(c10d, name)) for name in NAMES}
_served: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def served(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that is meant, or None where torch's own function shall answer.

    That is on a rank outside of the group, which torch warns or refuses without any transfer, and for groups that exist
    in one process only. All ranks of a group decide alike.

    Raises:
        UsageError: there is no such group.
    """
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group == outside:
        return None
    pg = existing(group)
    serves = _served.get(pg)
    if serves is None:
        serves = _served[pg] = _UNREAL.isdisjoint(backends_of(pg).values())
    return pg if serves else None


def torchs_own(name: str, *args: Any, weights_only: bool, **kwargs: Any) -> Any:
    """What torch's own function makes of a call.

    Raises:
        UsageError: ``weights_only`` is asked for, and this version of torch does not know it.
    """
    own = _torchs[name]
    if "weights_only" in inspect.signature(own).parameters:
        kwargs["weights_only"] = weights_only
    elif weights_only:
        raise UsageError(f"{name} of torch {torch.__version__} has no weights_only, and it has to answer this call")
    return own(*args, **kwargs)


def rank_given(rank: Any) -> int | None:
    """A rank as torch takes it: anything that is an integer."""
    return None if rank is None else operator.index(rank)


def root_of(group: dist.ProcessGroup, rank: Any, group_rank: Any, name: str) -> int:
    """The global rank of ``src`` or ``dst``, which may be this rank; global rank 0 where neither is given.

    Raises:
        UsageError: both are given, or it is not in the group.
    """
    rank, group_rank = rank_given(rank), rank_given(group_rank)
    members = dist.get_process_group_ranks(group)
    if rank is not None and group_rank is not None:
        raise UsageError(f"{name} and group_{name} are both given", rank=dist.get_rank())
    if group_rank is not None:
        if not 0 <= group_rank < len(members):
            raise UsageError(f"group_{name}={group_rank} is no rank of a group of {len(members)}", rank=dist.get_rank())
        return int(members[group_rank])
    root = rank or 0
    if root not in members:
        what = f"{name}={root}" if rank is not None else f"rank 0, which {name} is where it is not given,"
        raise UsageError(f"{what} is not in the group", rank=dist.get_rank())
    return root


def check_device(device: Any) -> None:
    """torch's ``device`` is where it puts its pickles on their way, so nothing is to be done but to see that it is one.

    Raises:
        RuntimeError, TypeError: it is none, as torch says it.
    """
    if device is not None:
        torch.device(device)
