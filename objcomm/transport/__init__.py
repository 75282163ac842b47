"""Moves bytes and tensors between this rank and its peers. Knows nothing of what they mean."""

from .accelerators import kind_here
from .base import Link, Pending, message_count
from .control import init_control
from .groups import Peer, existing, exists, name_of, rank_in, resolve, standing
from .routes import describe, forget, link

__all__ = [
    "Link",
    "Peer",
    "Pending",
    "describe",
    "existing",
    "exists",
    "forget",
    "init_control",
    "kind_here",
    "link",
    "message_count",
    "name_of",
    "rank_in",
    "resolve",
    "standing",
]
