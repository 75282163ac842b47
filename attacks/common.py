"""What the attempts are made of: messages as no honest rank writes them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch
from msgpack import ExtType

from objcomm.codec import Plan, codes, parse
from objcomm.config import Trust
from objcomm.errors import DecodeError
from objcomm.wire.frame import Terms

MAX_BYTES = 1 << 20
_CONTENTS = re.compile(r"the inline area has \d+ bytes, its contents (\d+)")
TERMS = Terms(window=1 << 16, max_bytes=MAX_BYTES)

Attack = Callable[[Trust], object]

ALL: dict[str, tuple[Attack, tuple[Trust, ...]]] = {}


def attack(*trusts: Trust) -> Callable[[Attack], Attack]:
    """Add an attempt: it must end with a typed error in each of these trust modes; both if none is named."""

    def add(function: Attack) -> Attack:
        ALL[function.__name__] = function, trusts or ("cluster", "restricted")
        return function

    return add


def mark(code: int, *items: Any, data: bytes = b"") -> list[Any]:
    """An array that becomes what its mark says."""
    return [ExtType(code, data), *items]


def leaf(code: int, index: int) -> ExtType:
    return ExtType(code, codes.number(index))


def packed(obj: Any) -> bytes:
    blob: bytes = msgpack.packb(obj, unicode_errors="surrogatepass")
    return blob


def message(
    tree: Any,
    *,
    memory: Any = None,
    names: Sequence[str] = (),
    composites: Sequence[Sequence[Any]] = (),
    classes: Sequence[Any] = (),
    stream: Any = None,
    definitions: Sequence[Any] = (),
) -> bytes:
    """A skeleton. ``tree`` may be bytes: a msgpack object as it is."""
    tables = packed([memory, list(names), list(classes), stream, len(definitions)])
    bodies = packed([mark(codes.DEFINITION, *parts) for parts in composites]) if composites else b""
    root = tree if isinstance(tree, bytes) else packed(tree)
    if definitions:
        defined = b"".join(packed(mark(codes.DEFINITION, body)) for body in definitions)
        root = b"\xdd" + struct.pack(">I", len(definitions) + 1) + defined + root
    return struct.pack("<BII", 1, len(tables), len(bodies)) + tables + bodies + root


def receive(
    skeleton: bytes,
    trust: Trust,
    inline: int | bytes | None = None,
    segments: Sequence[tuple[int, bool]] = (),
    max_bytes: int = MAX_BYTES,
) -> object:
    """What a rank does with a skeleton that has arrived; ``None`` is an inline area of the size that is described."""
    if inline is None:
        plan, nbytes = parse_to_size(skeleton, 0, segments, trust, max_bytes)
    else:
        nbytes = inline if isinstance(inline, int) else len(inline)
        plan = parse(skeleton, inline_bytes=nbytes, segments=segments, trust=trust, max_bytes=max_bytes)
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    if isinstance(inline, bytes):
        memory = torch.frombuffer(bytearray(inline), dtype=torch.uint8)
    return plan.build(memory, [torch.zeros(size, dtype=torch.uint8) for size, _ in segments])


def parse_to_size(
    skeleton: bytes | memoryview, nbytes: int, segments: Sequence[tuple[int, bool]], trust: Trust, max_bytes: int
) -> tuple[Plan, int]:
    """Parse, once more with an inline area of the size that is described if it is not ``nbytes``; and that size."""
    try:
        return parse(skeleton, inline_bytes=nbytes, segments=segments, trust=trust, max_bytes=max_bytes), nbytes
    except DecodeError as error:
        found = _CONTENTS.search(error.text)
        if found is None or int(found[1]) > max_bytes:
            raise
        nbytes = int(found[1])
    return parse(skeleton, inline_bytes=nbytes, segments=segments, trust=trust, max_bytes=max_bytes), nbytes


def tensor(dtype: int, shape: list[int], strides: list[int] | None = None, flags: int = 0) -> list[Any]:
    """A form of the memory table."""
    return [dtype, flags, shape, strides]


def composite(name: str, parts: Sequence[Any], forms: Sequence[Any] = ()) -> bytes:
    """A message that is one composite; ``forms`` describe the tensors that its parts refer to by number."""
    memory = [list(forms), list(range(len(forms))), [], []] if forms else None
    return message(leaf(codes.COMPOSITE, 0), memory=memory, names=[name], composites=[parts])


MEMORY = [leaf(codes.MEMORY, index) for index in range(8)]
INT64, FLOAT32, UINT8, COMPLEX64 = 4, 0, 8, 10
