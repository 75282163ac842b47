"""The pairs of this process: one for each peer of each group, for as long as the group lives."""

from __future__ import annotations

import os
import threading
import weakref

import torch.distributed as dist

from .errors import UsageError
from .pair import Pair
from .transport import Peer, link

_pairs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Pair]] = weakref.WeakKeyDictionary()
_pairs_lock = threading.Lock()
_every: weakref.WeakSet[Pair] = weakref.WeakSet()
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child has its parent's sockets but not its threads: it must neither use nor close what it inherited."""
    global _pairs_lock
    _pairs_lock = threading.Lock()
    _inherited.update(_pairs.keys())
    _pairs.clear()
    _every.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def pair_with(peer: Peer) -> Pair:
    """The pair of this rank and ``peer``, the same one for every call on their group."""
    of_group = _pairs.get(peer.group)
    pair = of_group.get(peer.group_rank) if of_group is not None else None
    if pair is not None:
        return pair
    if peer.group in _inherited:
        raise UsageError(
            "this process was forked from one that uses the group", hint="make a process group of its own, or spawn it"
        )
    made = link(peer.group, peer.group_rank)
    with _pairs_lock:
        pair = _pairs.setdefault(peer.group, {}).setdefault(peer.group_rank, Pair(made))
        _every.add(pair)
        return pair


def all_pairs() -> list[Pair]:
    """Every pair of this process that somebody still uses, its group destroyed or not."""
    return list(_every)
