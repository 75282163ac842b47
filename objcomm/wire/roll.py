"""The roll of a set of ranks, in the group's store: the number of the last call among them that each has noted."""

from __future__ import annotations

from .card import STORE_SECONDS, Store, peek, within


def sign(store: Store, key: str, rank: int, number: int) -> None:
    """Note that ``rank`` has come to call ``number`` of the ranks that ``key`` stands for.

    Raises:
        RuntimeError: the store does not answer.
    """
    within(STORE_SECONDS, lambda: store.set(f"objcomm/roll/{key}/{rank}", str(number)))


def signed(store: Store, key: str, rank: int) -> int:
    """The last call that ``rank`` has noted, 0 if none. Never waits.

    Raises:
        RuntimeError: the store does not answer, or what lies there is no number.
    """
    text = within(STORE_SECONDS, lambda: peek(store, f"objcomm/roll/{key}/{rank}"))
    try:
        return int(text or 0)
    except ValueError as error:
        raise RuntimeError(f"no number in the roll: {text!r}") from error
