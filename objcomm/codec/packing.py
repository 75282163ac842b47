"""Objects -> msgpack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from msgpack import Packer

from .codes import Part
from .levels import Entangled


class _Warm(threading.local):
    """A packer that keeps its buffer: a fresh one of 100 KiB costs more page faults than packing costs."""

    packer: Packer | None = None


_warm = _Warm()
_MOST_WARM_BYTES = 1 << 20


def pack_native(obj: Any, head: bytes) -> bytes:
    """Pack what msgpack has types for, behind ``head``."""
    # Taken, not borrowed: a collection may run a destructor that encodes something in the middle of this.
    packer, _warm.packer = _warm.packer or Packer(strict_types=True), None
    packed = _packed(packer, obj)
    if len(packed) <= _MOST_WARM_BYTES:
        _warm.packer = packer
    return b"".join((head, packed))


def pack(obj: Any, default: Callable[[Any], Part] | None = None) -> bytes:
    """Pack what msgpack has types for, and what ``default`` has parts for.

    Raises:
        Entangled: it is nested deeper than msgpack packs.
        ValueError: msgpack has no room for a string or a container, or ``default`` says so.
    """
    try:
        return _packed(Packer(strict_types=True, default=default), obj)
    except UnicodeEncodeError:  # a lone surrogate; with this error handler, msgpack copies every string once more
        return _packed(Packer(strict_types=True, default=default, unicode_errors="surrogatepass"), obj)


def _packed(packer: Packer, obj: Any) -> bytes:
    try:
        packed: bytes = packer.pack(obj)
    except ValueError as error:
        # The message is msgpack's only way to say so; any other ValueError is about a size or a string.
        if "recursion" in str(error):
            raise Entangled from error
        raise
    return packed
