"""The bytes of a skeleton: a format byte, then the tree alone, or tables, composites and the tree.

``PLAIN`` (0): the tree, nothing but msgpack's own types. ``TABLES`` (1): the lengths of the tables and of the
composites (two little-endian 32-bit numbers), then three msgpack objects. The tables are an array of

- the memory table, or nil,
- the names of the composites, in the order of their definitions,
- the class table: references to classes with their fields, and members of enums,
- nil, or index of the pickle stream in the memory table, number of its leaves, indices of its buffers,
- the number of shared definitions.

The composites are an array of definitions. The tree is the object or, if there are shared definitions, an array of
these and the object.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from msgpack import Packer, Unpacker, unpackb

from ..config import Trust
from ..errors import DecodeError
from . import codes, opaque
from .codes import Part, ext
from .deep import Rewriter
from .levels import Entangled, first_foreign
from .memory import Memory
from .scan import Scan

PLAIN, TABLES = 0, 1
_PLAIN_BYTE = bytes([PLAIN])
_HEADER = struct.Struct("<BII")
_DEFINITION = ext(codes.DEFINITION)


class _Warm(threading.local):
    """A packer that keeps its buffer: a fresh one of 100 KiB costs more page faults than packing costs."""

    packer: Packer | None = None


_warm = _Warm()
_MOST_WARM_BYTES = 1 << 20


def _pack_native(obj: Any) -> bytes:
    """Pack what msgpack has types for, behind the format byte."""
    # Taken, not borrowed: a collection may run a destructor that encodes something in the middle of this.
    packer, _warm.packer = _warm.packer or Packer(strict_types=True), None
    packed = _packed(packer, obj)
    if len(packed) <= _MOST_WARM_BYTES:
        _warm.packer = packer
    return b"".join((_PLAIN_BYTE, packed))


def _pack(obj: Any, default: Callable[[Any], Part] | None = None) -> bytes:
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


class Packed(NamedTuple):
    """A skeleton and the memory that goes with it (None: there is none)."""

    skeleton: bytes
    memory: Memory | None = None
    opaque: bool = False


def pack(obj: Any, trust: Trust, threshold: int) -> Packed:
    """Pack an object.

    Raises:
        Trouble: an object inside of it cannot be sent.
        EncodeError: the object as a whole cannot be sent.
    """
    try:
        level = first_foreign(obj, threshold)
        if level is None:
            try:
                return Packed(_pack_native(obj))
            except (OverflowError, ValueError):
                level = [obj]  # an integer or a string that msgpack has no room for, or lone surrogates
        scan = Scan(trust, threshold)
        scan.walk(level)
        return _pack_scanned(obj, scan)
    except Entangled:
        scan = Scan(trust, threshold, careful=True)
        scan.walk([obj])
        return _pack_scanned(obj, scan)


def _pack_scanned(obj: Any, scan: Scan) -> Packed:
    definitions: list[Part] = []
    stream = opaque.Stream(scan)
    stream.dump()
    scan.mistaken |= scan.repeats and bool(scan.dataclasses)
    try:
        tree = _pack_tree(obj, scan, definitions)
    except ValueError:
        scan.mistaken = True  # a string that msgpack has no room for
        tree = _pack_tree(obj, scan, definitions)
    stream.dump()  # what the tree has added
    entry = stream.finish()
    composites = b""
    if scan.composites:
        bodies = [[_DEFINITION, *parts] for _, parts in scan.composites]
        if scan.mistaken:
            rewriter = Rewriter(scan, share=False)
            bodies = [[_DEFINITION, *rewriter.rewrite(parts)] for _, parts in scan.composites]
        composites = _pack(bodies, scan.part)
    memory = scan.finish()
    names = [name for name, _ in scan.composites]
    tables = _pack([memory and memory.table, names, scan.classes.entries, entry, len(definitions)], scan.part)
    head = _HEADER.pack(TABLES, len(tables), len(composites))
    return Packed(b"".join((head, tables, composites, tree)), memory, entry is not None)


def _pack_tree(obj: Any, scan: Scan, definitions: list[Part]) -> bytes:
    if not scan.mistaken:
        return _pack(obj, scan.part)
    rewriter = Rewriter(scan)
    root = rewriter.rewrite(obj)
    definitions += rewriter.definitions
    return _pack([*definitions, root] if definitions else root, rewriter.part)


# -- reading -----------------------------------------------------------------------------------------------------------


_SHORT_BYTES = 4096


def _check(blob: memoryview) -> None:
    """Whether a long blob is one whole msgpack object: then what it allocates is bounded by its own length.

    msgpack makes a list as long as its header says before it looks for the items, each of which may be such a list;
    how long it may say grows with the blob, so that a short one needs no second look.
    """
    if len(blob) <= _SHORT_BYTES:
        return
    unpacker = Unpacker(max_buffer_size=max(1, len(blob)), strict_map_key=False)
    unpacker.feed(blob)
    unpacker.skip()
    if unpacker.tell() != len(blob):
        raise ValueError("there is more than one object")


def _no_leaves(code: int, data: bytes) -> Any:
    raise ValueError(f"extension code {code} has no place here")


def _table_leaf(code: int, data: bytes) -> int:
    if code != codes.INTEGER:
        raise ValueError(f"extension code {code} has no place in the tables")
    return int.from_bytes(data, "little", signed=True)


def unpack(
    blob: memoryview,
    leaf: Callable[[int, bytes], Any] = _no_leaves,
    array: Callable[[list[Any]], Any] | None = None,
    pairs: Callable[[list[tuple[Any, Any]]], Any] | None = None,
) -> Any:
    """One msgpack object that :func:`parse` has found whole."""
    return unpackb(
        blob,
        strict_map_key=False,
        unicode_errors="surrogatepass",
        ext_hook=leaf,
        list_hook=array,
        object_pairs_hook=pairs,
    )


class Stream(NamedTuple):
    """Where in the memory table the pickle stream and its buffers are, and how many leaves it holds."""

    at: int
    leaves: int
    buffers: list[int]


class Parsed(NamedTuple):
    """A skeleton that is whole, in its pieces.

    Attributes:
        plain: there are no tables: the tree is all.
    """

    tree: memoryview
    plain: bool = True
    memory: Any = None
    names: tuple[str, ...] = ()
    classes: tuple[Any, ...] = ()
    stream: Stream | None = None
    definitions: int = 0
    composites: memoryview = memoryview(b"")


def parse(skeleton: bytes | memoryview) -> Parsed:
    """Take a skeleton apart without building anything of it.

    Raises:
        DecodeError: it is malformed.
    """
    try:
        view = memoryview(skeleton).cast("B")
        if len(view) and view[0] == PLAIN:
            _check(view[1:])
            return Parsed(view[1:])
        return _parse_tables(view)
    except Exception as error:
        raise DecodeError(f"the skeleton is malformed: {type(error).__name__}: {error}") from error


def _parse_tables(view: memoryview) -> Parsed:
    tag, tables_bytes, composites_bytes = _HEADER.unpack_from(view)
    composites_at = _HEADER.size + tables_bytes
    tree_at = composites_at + composites_bytes
    if tag != TABLES or tree_at > len(view):
        raise ValueError("unknown format or lengths")
    blobs = view[_HEADER.size : composites_at], view[composites_at:tree_at], view[tree_at:]
    for blob in blobs:
        if len(blob) or blob is not blobs[1]:
            _check(blob)
    memory, names, classes, stream, definitions = unpack(blobs[0], _table_leaf)
    if not (_are(names, str) and _are(classes, list) and _is_count(definitions) and bool(names) == bool(blobs[1])):
        raise ValueError("tables of the wrong types")
    if stream is not None:
        at, leaves, buffers = stream
        if not (_is_count(at) and _is_count(leaves) and _are(buffers, int)):
            raise ValueError("a wrong description of the pickle stream")
        stream = Stream(at, leaves, buffers)
    return Parsed(blobs[2], False, memory, tuple(names), tuple(classes), stream, definitions, blobs[1])


def _are(items: Any, kind: type) -> bool:
    return type(items) is list and all(type(item) is kind for item in items)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
