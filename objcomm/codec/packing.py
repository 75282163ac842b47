"""Objects -> msgpack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from msgpack import Packer

from .codes import Part
from .levels import Entangled


class _Warm(threading.local):
    """Packers that keep their buffers: a fresh one costs more page faults than packing a small object costs.

    Attributes:
        packer: packs what msgpack has types for.
        leaves: packs, beside that, each object whose id is in a dict as what the dict says.
    """

    packer: Packer | None = None
    leaves: tuple[Packer, dict[int, Part]] | None = None


_warm = _Warm()
_MOST_WARM_BYTES = 1 << 20


def pack_native(obj: Any, head: bytes) -> bytes:
    """Pack what msgpack has types for, behind ``head``."""
    # Taken, not borrowed: a collection may run a destructor that encodes something in the middle of this.
    packer, _warm.packer = _warm.packer or Packer(strict_types=True), None
    packed = _packed(packer, obj)
    if len(packed) <= _MOST_WARM_BYTES:
        _warm.packer = packer
    return head + packed


def pack_leaves(obj: Any, found: Sequence[Any], leaves: Sequence[Part]) -> bytes:
    """Pack what msgpack has types for, and for each object of ``found`` its leaf.

    Raises:
        KeyError: there is something else in ``obj``.
        Entangled, ValueError: as :func:`pack`.
    """
    taken, _warm.leaves = _warm.leaves, None
    if taken is None:
        parts: dict[int, Part] = {}
        taken = Packer(strict_types=True, default=lambda obj: parts[id(obj)]), parts
    packer, parts = taken
    parts.update(zip(map(id, found), leaves))  # noqa: B905  there may be more leaves
    packed = _packed(packer, obj)
    parts.clear()
    if len(packed) <= _MOST_WARM_BYTES:
        _warm.leaves = taken
    return packed


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
