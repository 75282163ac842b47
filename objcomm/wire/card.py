"""The handshake of a group: every rank puts a card with its terms into the group's store before its first message.

A sender never waits for a card, so that ranks may come in any order: it posts its first head, and once that was taken,
which no rank does before it has published its own card, it compares. The receiver needs no card: every head carries the
sender's terms. A rank that refuses a peer's message for good leaves a refusal in the store, which explains the closed
connection to the peer.
"""

from __future__ import annotations

import json
from typing import Protocol

from ..errors import ProtocolError
from .frame import Terms

_MAX_CARD_BYTES = 4096


class Store(Protocol):
    """What a card needs of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def publish(store: Store, rank: int, terms: Terms) -> None:
    """Put this rank's card into the group's store."""
    card = {"rank": rank, "version": terms.version, "window": terms.window, "max_bytes": terms.max_bytes}
    store.set(f"objcomm/card/{rank}", json.dumps(card))


def terms_of(store: Store, rank: int) -> Terms | None:
    """The terms on a peer's card, or ``None`` while it has none. Never waits.

    Raises:
        ProtocolError: what lies there is no card.
    """
    text = _peek(store, f"objcomm/card/{rank}")
    if text is None:
        return None
    try:
        card = json.loads(text)
        return Terms(window=int(card["window"]), max_bytes=int(card["max_bytes"]), version=int(card["version"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"the card of rank {rank} in the group's store cannot be read: {error!r}") from error


def refuse(store: Store, rank: int, peer: int, reason: str) -> None:
    """Leave for ``peer`` why this rank takes no more of its messages."""
    store.set(f"objcomm/refused/{peer}/{rank}", reason[:_MAX_CARD_BYTES])


def refusal(store: Store, rank: int, peer: int) -> str | None:
    """Why ``peer`` refused this rank's messages, or ``None``. Never waits."""
    text = _peek(store, f"objcomm/refused/{rank}/{peer}")
    return None if text is None else text.decode("utf-8", "replace")


def _peek(store: Store, key: str) -> bytes | None:
    if not store.check([key]):
        return None
    text = store.get(key)
    if len(text) > _MAX_CARD_BYTES:
        raise ProtocolError(f"an entry of the group's store is too long for objcomm: {key}, {len(text)} bytes")
    return text
