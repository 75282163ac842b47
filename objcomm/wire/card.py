"""The handshake of a group: every rank puts a card with its terms into the group's store before its first message.

A sender never waits for a card, so that ranks may come in any order: it posts its first head, and once that was taken,
which no rank does before it has published its own card, it compares. The receiver needs no card: every head carries the
sender's terms. A rank that refuses a peer's message for good leaves a refusal in the store, which explains the closed
connection to the peer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from ..errors import ProtocolError
from ..packed import printable
from .frame import Terms

_MAX_CARD_BYTES = 4096
# A store whose host is frozen answers never, and has no time-out of its own for most of its calls.
STORE_SECONDS = 30.0
# What only makes an error clearer is not worth a long wait.
_REASON_SECONDS = 2.0

T = TypeVar("T")


class Store(Protocol):
    """What a card needs of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def publish(store: Store, rank: int, terms: Terms) -> None:
    """Put this rank's card into the group's store.

    Raises:
        RuntimeError: the store does not answer.
    """
    card = {"rank": rank, "version": terms.version, "window": terms.window, "max_bytes": terms.max_bytes}
    within(STORE_SECONDS, lambda: store.set(f"objcomm/card/{rank}", json.dumps(card)))


def terms_of(store: Store, rank: int) -> Terms | None:
    """The terms on a peer's card, or ``None`` while it has none. Never waits.

    Raises:
        ProtocolError: what lies there is no card.
        RuntimeError: the store does not answer.
    """
    text = within(STORE_SECONDS, lambda: peek(store, f"objcomm/card/{rank}"))
    if text is None:
        return None
    try:
        card = json.loads(text)
        return Terms(window=int(card["window"]), max_bytes=int(card["max_bytes"]), version=int(card["version"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"the card of rank {rank} in the group's store cannot be read: {error!r}") from error


def has_come(store: Store, rank: int) -> bool:
    """Whether a rank has published a card; for what only makes an error clearer.

    Raises:
        RuntimeError: the store does not answer.
    """
    return within(_REASON_SECONDS, lambda: store.check([f"objcomm/card/{rank}"]))


def refuse(store: Store, rank: int, peer: int, reason: str) -> None:
    """Leave for ``peer`` why this rank takes no more of its messages.

    Raises:
        RuntimeError: the store does not answer.
    """
    within(_REASON_SECONDS, lambda: store.set(f"objcomm/refused/{peer}/{rank}", _clipped(reason)))


def refusal(store: Store, rank: int, peer: int) -> str | None:
    """Why ``peer`` refused this rank's messages, or ``None``.

    Raises:
        RuntimeError: the store does not answer.
    """
    text = within(_REASON_SECONDS, lambda: peek(store, f"objcomm/refused/{rank}/{peer}"))
    return printable(text.decode("utf-8", "replace")) if text else None


def forget(store: Store, rank: int, peer: int) -> None:
    """Clear what ``peer`` left for this rank, before anything is sent: it is of a group that had the same store before.

    Raises:
        RuntimeError: the store does not answer.
    """
    within(STORE_SECONDS, lambda: store.set(f"objcomm/refused/{rank}/{peer}", ""))


def say(store: Store, rank: int, text: str) -> None:
    """Leave for the peers what this rank is doing; the last word counts.

    Raises:
        RuntimeError: the store does not answer.
    """
    within(_REASON_SECONDS, lambda: store.set(f"objcomm/said/{rank}", _clipped(text)))


def said(store: Store, rank: int) -> str | None:
    """What a rank said last, or ``None``.

    Raises:
        RuntimeError: the store does not answer.
    """
    text = within(_REASON_SECONDS, lambda: peek(store, f"objcomm/said/{rank}"))
    return printable(text.decode("utf-8", "replace")) if text else None


def _clipped(text: str) -> str:
    """What an entry has room for."""
    return text.encode("utf-8", "replace")[:_MAX_CARD_BYTES].decode("utf-8", "ignore")


def peek(store: Store, key: str) -> bytes | None:
    """What lies in the store, if anything does."""
    if not store.check([key]):
        return None
    text = store.get(key)
    if len(text) > _MAX_CARD_BYTES:
        raise ProtocolError(f"an entry of the group's store is too long for objcomm: {key}, {len(text)} bytes")
    return text


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call of the store, or a ``RuntimeError`` if it takes longer."""
    results: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    asking = threading.Thread(target=ask, name="objcomm-store", daemon=True)
    try:
        asking.start()
    except RuntimeError:  # no thread can be had any more, as when the interpreter ends
        return call()
    asking.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return results[0]
