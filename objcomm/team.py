"""Who takes part in a call among several ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from .deadline import Deadline
from .errors import UsageError
from .labels import label
from .pair import Pair
from .pairs import pair_for, refuse_fakes
from .transport import existing, rank_in
from .wire.frame import channel_name
from .work import deadline_for

# The name of a call lists the ranks up to this many; of more it has a checksum.
_MOST_LISTED = 16


class Team:
    """The ranks of one call, this one among them.

    Attributes:
        group: that all of them belong to.
        rank: of this process.
        ranks: all of them, in the order in which lists of objects are given and returned.
        pairs: by rank, those with the others.
    """

    __slots__ = ("_among", "group", "pairs", "rank", "ranks")

    def __init__(self, group: ProcessGroup | None, ranks: Sequence[int] | None) -> None:
        if torch._C._len_torch_dispatch_stack():
            refuse_fakes()
        self.rank = rank_in(group)
        self.group: ProcessGroup = existing(group)
        self.ranks = get_process_group_ranks(group) if ranks is None else _checked(ranks, self.rank)
        self.pairs: dict[int, Pair] = {
            rank: pair_for(group, rank, None, "ranks") for rank in self.ranks if rank != self.rank
        }
        self._among = "" if ranks is None or len(self.ranks) == self.group.size() else _among(sorted(self.ranks))

    def from_here(self) -> list[tuple[int, Pair]]:
        """The others in the order of their ranks, beginning behind this one: not everybody turns to the same first."""
        order = sorted(self.pairs)
        later = [rank for rank in order if rank > self.rank]
        return [(rank, self.pairs[rank]) for rank in later + order[: len(order) - len(later)]]

    def label(self, call: str, channel: str) -> str:
        """The name under which the messages of ``call`` travel among these ranks."""
        channel_name(channel)  # for the error that names it as the program gave it
        return label(call + self._among, channel)

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


def among_of(ranks: Sequence[int] | None) -> list[int] | None:
    """The ranks of a call in which it does not matter if one is named twice."""
    if ranks is None:
        return None
    try:
        return list(dict.fromkeys(ranks))
    except TypeError:
        return _listed(ranks)  # told by whoever looks at them


def _listed(ranks: Iterable[int]) -> list[int]:
    try:
        return list(ranks)
    except TypeError:
        raise UsageError(f"ranks must be several ints, not {ranks!r}") from None


def _checked(ranks: Sequence[int], me: int) -> list[int]:
    members = _listed(ranks)
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in members):
        raise UsageError(f"ranks must be ints: {members}", rank=me)
    if len(set(members)) < len(members):
        raise UsageError(f"ranks names a rank more than once: {members}", rank=me)
    if me not in members:
        raise UsageError(f"this rank, {me}, is not among the ranks of this call: {members}", rank=me)
    return members


def _among(order: Sequence[int]) -> str:
    """What is said of ranks that are not all of a group: no message may be taken for one of a call among others."""
    if len(order) <= _MOST_LISTED:
        return f" among {','.join(map(str, order))}"
    return f" among {len(order)} ranks {zlib.crc32(repr(order).encode()):08x}"
