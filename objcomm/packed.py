"""msgpack and text from others: what reading it allocates is bounded by its own length, and showing it is safe."""

from __future__ import annotations

from typing import Any

from msgpack import Unpacker, unpackb


def check_whole(blob: bytes | memoryview) -> None:
    """Whether these bytes are one whole msgpack object: then what it allocates is bounded by its own length.

    msgpack makes a list as long as its header says before it looks for the items, each of which may be such a list.

    Raises:
        ValueError: they are not.
    """
    unpacker = Unpacker(max_buffer_size=len(blob), strict_map_key=False)
    unpacker.feed(blob)
    unpacker.skip()
    if unpacker.tell() != len(blob):
        raise ValueError("there is more than one object")


def read_whole(blob: bytes | memoryview) -> Any:
    """One msgpack object of native types and nothing else, with strings as keys.

    Raises:
        ValueError: it is malformed.

    >>> read_whole(b"\\x93\\x01\\x02\\xa1a")
    [1, 2, 'a']
    """
    check_whole(blob)
    return unpackb(blob)


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text that somebody else wrote, without what a terminal would obey.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return text if text.isprintable() else text.translate(_CONTROL)
