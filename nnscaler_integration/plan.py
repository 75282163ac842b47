"""From where a value is and where it is used to the transfers that bring it there. Knows nothing of nnScaler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Move:
    """One device hands the value to one other."""

    src: int
    dst: int


@dataclass(frozen=True)
class Broadcast:
    """One device hands the value to several others."""

    src: int
    dsts: tuple[int, ...]


Step: TypeAlias = Move | Broadcast


@dataclass(frozen=True)
class Use:
    """One place that uses the value.

    Args:
        devices: the devices that run it.
        alone: it is scheduled on its own, as a pipeline stage is, so what it needs travels separately from what
            other places need. Uses that are not alone run in one sequence and are served together, once.
    """

    devices: tuple[int, ...]
    alone: bool = False


@dataclass(frozen=True)
class Transfer:
    """What has to happen right before the use with number ``before``."""

    before: int
    steps: tuple[Step, ...]


def plan_steps(holders: Iterable[int], needed: Iterable[int]) -> tuple[Step, ...]:
    """Bring a value from the devices that hold it to those that need it.

    Every device takes part in one step at most. Devices that hold the value already get nothing; the others are dealt
    out to the holders in runs as equal as possible, in ascending order, so that replicas pair up one to one and nobody
    sends more than its share.

    >>> plan_steps([0, 1], [2, 3])
    (Move(src=0, dst=2), Move(src=1, dst=3))
    >>> plan_steps([0], [0, 1, 2])
    (Broadcast(src=0, dsts=(1, 2)),)
    >>> plan_steps([0, 1, 2, 3], [4])
    (Move(src=0, dst=4),)

    Raises:
        ValueError: something is needed and nobody holds it.
    """
    sources = sorted(set(holders))
    missing = sorted(set(needed) - set(sources))
    if not missing:
        return ()
    if not sources:
        raise ValueError(f"devices {missing} need a value that no device holds")
    count = min(len(sources), len(missing))
    # With more holders than takers, take holders that lie apart: neighbours tend to share a link.
    senders = [sources[index * len(sources) // count] for index in range(count)]
    steps: list[Step] = []
    for index, src in enumerate(senders):
        share = missing[index * len(missing) // count : (index + 1) * len(missing) // count]
        steps.append(Move(src, share[0]) if len(share) == 1 else Broadcast(src, tuple(share)))
    return tuple(steps)


def plan_transfers(holders: Iterable[int], uses: Sequence[Use]) -> list[Transfer]:
    """The transfers that serve all uses of one value, given in the order in which they run.

    What a device received once it has: a later use there gets nothing. Values always come from where they were made,
    never from a device that received them, so a far stage does not wait for the stages between.

    >>> plan_transfers([0], [Use((1,), alone=True), Use((2,), alone=True), Use((1,), alone=True)])
    [Transfer(before=0, steps=(Move(src=0, dst=1),)), Transfer(before=1, steps=(Move(src=0, dst=2),))]
    >>> plan_transfers([0], [Use((0,)), Use((1,)), Use((2,))])
    [Transfer(before=1, steps=(Broadcast(src=0, dsts=(1, 2)),))]
    """
    origin = frozenset(holders)
    have = set(origin)
    together = {device for use in uses if not use.alone for device in use.devices}
    transfers = []
    for number, use in enumerate(uses):
        if have.issuperset(use.devices):
            continue
        missing = (set(use.devices) if use.alone else together) - have
        transfers.append(Transfer(number, plan_steps(origin, missing)))
        have |= missing
    return transfers
