"""Who takes part in a call among several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from .deadline import Deadline
from .errors import UsageError
from .pair import Pair
from .pairs import pair_for, refuse_fakes
from .transport import existing, rank_in
from .work import deadline_for


class Team:
    """The ranks of one call, this one among them.

    Attributes:
        group: that all of them belong to.
        rank: of this process.
        ranks: all of them, in the order in which lists of objects are given and returned.
        pairs: by rank, those with the others.
    """

    __slots__ = ("group", "pairs", "rank", "ranks")

    def __init__(self, group: ProcessGroup | None, ranks: Sequence[int] | None) -> None:
        if torch._C._len_torch_dispatch_stack():
            refuse_fakes()
        self.rank = rank_in(group)
        self.group: ProcessGroup = existing(group)
        self.ranks = get_process_group_ranks(group) if ranks is None else _checked(ranks, self.rank)
        self.pairs: dict[int, Pair] = {
            rank: pair_for(group, rank, None, "ranks") for rank in self.ranks if rank != self.rank
        }

    def from_here(self) -> list[tuple[int, Pair]]:
        """The others in the order of their ranks, beginning behind this one: not everybody turns to the same first."""
        order = sorted(self.pairs)
        later = [rank for rank in order if rank > self.rank]
        return [(rank, self.pairs[rank]) for rank in later + order[: len(order) - len(later)]]

    def deadline(self, timeout: float | None) -> Deadline:
        """Of the whole call."""
        return deadline_for(next(iter(self.pairs.values())), timeout) if self.pairs else Deadline(timeout)

    def member(self, group: ProcessGroup | None, rank: int | None, group_rank: int | None, name: str) -> int:
        """The global rank of ``src`` or ``dst``, which may be this rank, and must be one of the team."""
        if (rank is None) == (group_rank is None):
            given = "neither is given" if rank is None else "both are given"
            raise UsageError(f"exactly one of {name} and group_{name} must be given, and {given}", rank=self.rank)
        argument, value = (name, rank) if group_rank is None else (f"group_{name}", group_rank)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{argument} must be a rank, an int, not {type(value).__name__}", rank=self.rank)
        if group_rank is not None:
            members = get_process_group_ranks(group)
            if not 0 <= group_rank < len(members):
                raise UsageError(f"group_{name}={group_rank} is no rank of a group of {len(members)}", rank=self.rank)
            value = members[group_rank]
        if value not in self.ranks:
            raise UsageError(f"{name}, {value}, is not among the ranks of this call: {self.ranks}", rank=self.rank)
        return value


def _checked(ranks: Sequence[int], me: int) -> list[int]:
    members = list(ranks)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in members):
        raise UsageError(f"ranks must be ints: {members}", rank=me)
    if len(set(members)) < len(members):
        raise UsageError(f"ranks names a rank more than once: {members}", rank=me)
    if me not in members:
        raise UsageError(f"this rank, {me}, is not among the ranks of this call: {members}", rank=me)
    return members
