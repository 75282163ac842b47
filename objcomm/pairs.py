"""The pairs of this process: one for each peer of each group, for as long as the group lives."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import timeline
from .errors import UsageError
from .pair import Pair
from .transport import Peer, exists, forget, link, name_of, resolve, standing

_C: Any = torch._C
_pairs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Pair]] = weakref.WeakKeyDictionary()
_pairs_lock = threading.Lock()
_every: weakref.WeakSet[Pair] = weakref.WeakSet()
# By the id of a group: the group, and its pairs by (rank, group_rank) as calls give them. It saves a message the way
# through weak dictionaries; an entry goes with its group.
_given: dict[int, tuple[weakref.ref[dist.ProcessGroup], dict[tuple[int | None, int | None], Pair]]] = {}
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


_when_first_used: list[Callable[[], None]] = []


def ask_when_first_used(call: Callable[[], None]) -> None:
    """Call ``call`` whenever this process gets to know a peer."""
    _when_first_used.append(call)


def _after_fork() -> None:
    """A forked child has its parent's sockets but not its threads: it must neither use nor close what it inherited."""
    global _pairs_lock
    _pairs_lock = threading.Lock()
    _inherited.update(_pairs.keys())
    _pairs.clear()
    _given.clear()
    _every.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def refuse_fakes() -> None:
    """For calls made while torch dispatches through modes.

    Raises:
        UsageError: one of them makes fake tensors.
    """
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None:
        raise UsageError("under FakeTensorMode no memory is real", hint="send and receive outside of it")


def pair_for(group: dist.ProcessGroup | None, rank: int | None, group_rank: int | None, name: str) -> Pair:
    """The pair of this rank and the peer that a call means; ``name`` is that of the call's argument.

    Raises:
        UsageError: as :func:`objcomm.transport.resolve`.
    """
    existing = standing(group)
    given = _given.get(id(existing))
    # What is known was given as plain ints; True and 1.0 are equal to one, and a list cannot be looked up.
    if given is not None and given[0]() is existing and (type(rank) is int or type(group_rank) is int):
        pair = given[1].get((rank, group_rank))
        if pair is not None:
            return pair
    peer = resolve(group, rank, group_rank, name)
    pair = pair_with(peer)
    key = id(peer.group)
    if given is None or given[0]() is not peer.group:
        given = _given[key] = weakref.ref(peer.group, lambda _: _given.pop(key, None)), {}
    given[1][peer.rank, None] = given[1][None, peer.group_rank] = pair
    return pair


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
    forget_destroyed()
    made = link(peer.group, peer.group_rank)
    timeline.begin_if_asked()
    for call in _when_first_used:
        call()
    with _pairs_lock:
        pair = _pairs.setdefault(peer.group, {}).setdefault(peer.group_rank, Pair(made))
        pair.group_name = name_of(peer.group)
        _every.add(pair)
        return pair


def forget_destroyed() -> None:
    """Let go of the pairs of groups that were destroyed, with their connections and what was in flight.

    One that failed does not go with its group by itself: its transfers keep errors, these the frames that they went
    through, and one of these names the group. A key that its own value leads to stays in a weak dictionary.
    """
    with _pairs_lock:
        destroyed = [group for group in list(_pairs) if not exists(group)]
        pairs = [pair for group in destroyed for pair in _pairs[group].values()]
        for group in destroyed:
            del _pairs[group]
            _given.pop(id(group), None)
    for group in destroyed:
        forget(group)
    for pair in pairs:
        # Now, not when Python finds the time: the peer may be waiting.
        pair.link.close()


def all_pairs() -> list[Pair]:
    """Every pair of this process that somebody still uses, its group destroyed or not."""
    return list(_every)
