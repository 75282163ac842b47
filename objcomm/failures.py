"""What went wrong in a call among several ranks: what to raise here, and what to tell the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from .deadline import Deadline
from .errors import ObjcommError, PeerError, TransferTimeout
from .labels import plain
from .outgoing import Outgoing
from .pair import Pair
from .relay import Piece
from .rollcall import Call
from .wire.bundle import Parcel
from .wire.notice import Notice, error_of, notice_of

E = TypeVar("E", bound=ObjcommError)

# One reason is enough; a few more may help whoever debugs.
_MOST_TOLD = 4
_ALL_ALIKE = "every rank of the call must make it, with the same arguments: objcomm.debug() compares them first"


def placed(error: E, rank: int, label: str, peer: int | None = None, phase: str | None = None) -> E:
    """The same error, told where it happened, with the channel that the program knows."""
    if error.channel == label:
        error.channel = None
    return error.locate(rank=rank, peer=peer, channel=plain(label), phase=phase)


class Failures:
    """In the order in which they became known, this rank's own first."""

    __slots__ = ("_call", "_found", "_heard", "_kept", "_label", "_lost", "_rank", "_seconds")

    def __init__(self, rank: int, label: str, call: Call | None = None, deadline: Deadline | None = None) -> None:
        """``call`` and its ``deadline``, if all ranks wait for all: then who is missing can be named."""
        self._call = call
        self._rank = rank
        self._label = label
        self._seconds = 0.0 if deadline is None else deadline.seconds
        # Who sent something in this call, and whose connection is gone.
        self._heard: set[int] = set()
        self._lost: set[int] = set()
        self._found: list[tuple[Notice, BaseException]] = []
        self._kept: ObjcommError | None = None

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def first(self) -> tuple[BaseException, int]:
        """What failed first, and on which rank."""
        notice, error = self._found[0]
        return error, self._rank if notice.rank is None else notice.rank

    def own(self, error: BaseException) -> None:
        """Something failed on this rank before anything left it."""
        if isinstance(error, ObjcommError):
            placed(error, self._rank, self._label, phase="encode")
        self._found.insert(0, (notice_of(error, self._rank), error))

    def note(self, error: ObjcommError, pair: Pair) -> None:
        """Something failed between this rank and another, or the other told so."""
        placed(error, self._rank, self._label, pair.peer)
        if isinstance(error, TransferTimeout):
            error.hint = error.hint or _ALL_ALIKE
        self._found.append((notice_of(error, error.peer), error))
        if pair.closed is not None:
            self._lost.add(pair.peer)

    def present(self, pair: Pair) -> None:
        """A message of this call came from a rank."""
        self._heard.add(pair.peer)

    def hear(self, notice: Notice | None) -> None:
        """What a rank told of itself or of another; of this rank, this rank knows more."""
        if notice is not None and notice.rank != self._rank:
            heard = placed(error_of(notice, self._rank), self._rank, self._label)
            self._found.append((notice, heard))

    def keep(self, error: ObjcommError) -> None:
        """Something that concerns this rank alone, such as an object that cannot be built here."""
        self._kept = self._kept or placed(error, self._rank, self._label)

    def told(self) -> list[Piece]:
        """What to tell the others."""
        return [Piece(Parcel(notice.rank or 0, notice), None) for notice, _ in self._found[:_MOST_TOLD]]

    def wait_for(self, outgoings: Sequence[Outgoing], deadline: Deadline) -> None:
        """Wait until sends are over."""
        for outgoing in outgoings:
            try:
                outgoing.wait(deadline)
            except ObjcommError as error:
                self.note(error, outgoing.pair)

    def check(self) -> None:
        """Raise what failed, if anything did."""
        if self._found:
            raise self._named()
        if self._kept is not None:
            raise self._kept

    def _named(self) -> BaseException:
        """What failed first, or, where that follows from a rank that is not there, that."""
        first = self._found[0][1]
        if self._call is None:
            return first
        if not self._lost and not any(isinstance(error, TransferTimeout) for _, error in self._found):
            return first
        if self._found[0][0].rank == self._rank:
            self._call.note()
            return first
        missing = self._call.missing(self._heard)
        # Who is gone and has left no note did not wait for anybody: the connection itself is the reason.
        if not missing or (isinstance(first, PeerError) and self._lost & set(missing)):
            return first
        if isinstance(first, TransferTimeout) and first.peer in missing and len(missing) == 1 and not self._lost:
            return first
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        named = TransferTimeout(
            f"{who} not made this call within {self._seconds:g} s",
            rank=self._rank,
            peer=missing[0],
            channel=plain(self._label),
            phase="head",
            hint=_ALL_ALIKE,
        )
        named.__cause__ = first
        return named
