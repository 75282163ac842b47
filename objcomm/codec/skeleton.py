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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from msgpack import unpackb

from ..config import Trust
from ..errors import DecodeError, EncodeError
from ..packed import check_whole
from . import codes, opaque, packing, runs
from .codes import Part, ext
from .columns import columns_of
from .deep import Rewriter
from .encoded import Encoded
from .keys import Keys
from .levels import Entangled, survey
from .memory import MemoryWriter
from .scan import Scan

PLAIN, TABLES = 0, 1
_PLAIN_BYTE = bytes([PLAIN])
_HEADER = struct.Struct("<BII")
_DEFINITION = ext(codes.DEFINITION)


def pack(obj: Any, trust: Trust, threshold: int, forbid_grad: bool = False) -> Encoded:
    """Pack an object.

    Raises:
        Trouble: an object inside of it cannot be sent.
        EncodeError: the object as a whole cannot be sent.
    """
    try:
        level, found = survey(obj, threshold)
        if level is None:
            try:
                return Encoded(packing.pack_native(obj, _PLAIN_BYTE))
            except (OverflowError, ValueError):
                level = [obj]  # an integer or a string that msgpack has no room for, or lone surrogates
        packed = _pack_tensors(obj, found, threshold, forbid_grad) if found else None
        if packed is not None:
            return packed
        return _pack_scanned(obj, level, Scan(trust, threshold, forbid_grad=forbid_grad))
    except Entangled:
        return _pack_scanned(obj, [obj], Scan(trust, threshold, careful=True, forbid_grad=forbid_grad))


def _pack_tensors(obj: Any, found: list[torch.Tensor], threshold: int, forbid_grad: bool) -> Encoded | None:
    """Pack an object in which tensors are all that is not native; None if it takes a scan, if only to say why not."""
    if len(set(map(id, found))) < len(found):
        found = list({id(tensor): tensor for tensor in found}.values())
    try:
        columns = columns_of(found)
        if columns is None or (forbid_grad and any(tensor.requires_grad for tensor in found)):
            return None
        folded = runs.fold(obj, found)
        if runs.is_folded(folded):
            tree = packing.pack(folded)
        else:
            tree = packing.pack_leaves(folded, found, codes.memory_leaves(len(found)))
    except (EncodeError, KeyError, ValueError, OverflowError):
        return None
    writer = MemoryWriter(threshold)
    writer.add_columns(found, columns)
    memory = writer.finish()
    layout = memory.layout
    if not layout.tables:
        tables = packing.pack([layout.table, [], [], None, 0])
        layout.tables = _HEADER.pack(TABLES, len(tables), 0) + tables
    return Encoded(layout.tables + tree, memory)


def _pack_scanned(obj: Any, level: list[Any], scan: Scan) -> Encoded:
    try:
        scan.walk(level)
        return _pack_walked(obj, scan)
    finally:
        scan.release()


def _pack_walked(obj: Any, scan: Scan) -> Encoded:
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
    scan.gather()
    composites = b""
    if scan.composites:
        bodies = [[_DEFINITION, *parts] for _, parts in scan.composites]
        if scan.mistaken:
            rewriter = Rewriter(scan, share=False)
            bodies = [[_DEFINITION, *rewriter.rewrite(parts)] for _, parts in scan.composites]
        composites = packing.pack(bodies, scan.part)
    memory = scan.finish()
    names = [name for name, _ in scan.composites]
    tables = packing.pack([memory and memory.table, names, scan.classes.entries, entry, len(definitions)], scan.part)
    head = _HEADER.pack(TABLES, len(tables), len(composites))
    return Encoded(b"".join((head, tables, composites, tree)), memory, entry is not None, scan.history)


def _pack_tree(obj: Any, scan: Scan, definitions: list[Part]) -> bytes:
    if not scan.mistaken:
        return packing.pack(obj, scan.part)
    rewriter = Rewriter(scan)
    root = rewriter.rewrite(obj)
    definitions += rewriter.definitions
    return packing.pack([*definitions, root] if definitions else root, rewriter.part)


# -- reading -----------------------------------------------------------------------------------------------------------


_SHORT_BYTES = 4096


def _no_leaves(code: int, data: bytes) -> Any:
    raise ValueError(f"extension code {code} has no place here")


def _table_leaf(code: int, data: bytes) -> int:
    if code != codes.INTEGER:
        raise ValueError(f"extension code {code} has no place in the tables")
    return int.from_bytes(data, "little", signed=True)


def unpack(
    blob: bytes | memoryview,
    leaf: Callable[[int, bytes], Any] = _no_leaves,
    array: Callable[[list[Any]], Any] | None = None,
    pairs: Callable[[list[tuple[Any, Any]]], Any] | None = None,
    *,
    only_salted: bool = False,
) -> Any:
    """One msgpack object that :func:`split` has found whole.

    With ``only_salted`` msgpack raises a ``ValueError`` if a map has other keys than strings and bytes.
    """
    return unpackb(
        blob,
        strict_map_key=only_salted,
        unicode_errors="surrogatepass",
        ext_hook=leaf,
        list_hook=array,
        object_pairs_hook=pairs,
    )


def unpack_watched(
    blob: bytes | memoryview,
    pairs: Callable[[list[tuple[Any, Any]]], Any],
    leaf: Callable[[int, bytes], Any] = _no_leaves,
    array: Callable[[list[Any]], Any] | None = None,
    *,
    again: Callable[[], None] = lambda: None,
) -> Any:
    """The same in restricted trust: if a map has keys that could be chosen to collide, ``pairs`` makes every dict.

    That takes a second look from the start; ``again`` is called before it.
    """
    try:
        return unpack(blob, leaf, array, only_salted=True)
    except ValueError as error:
        if "strict_map_key" not in str(error):
            raise
    again()
    return unpack(blob, leaf, array, pairs)


def unpack_plain(blob: bytes | memoryview, restricted: bool) -> Any:
    """A tree of msgpack's own types."""
    return unpack_watched(blob, Keys().pairs) if restricted else unpack(blob)


class Stream(NamedTuple):
    """Where in the memory table the pickle stream and its buffers are, and how many leaves it holds."""

    at: int
    leaves: int
    buffers: list[int]


class Parsed(NamedTuple):
    """A skeleton that is whole, in its pieces.

    Attributes:
        plain: there are no tables: the tree is all.
        short: it is plain, and so short that building it makes no work for the garbage collector.
    """

    tree: memoryview
    plain: bool = True
    short: bool = False
    memory: Any = None
    names: tuple[str, ...] = ()
    classes: tuple[Any, ...] = ()
    stream: Stream | None = None
    definitions: int = 0
    composites: memoryview = memoryview(b"")

    @property
    def only_memory(self) -> bool:
        """The tables hold nothing beside the memory table."""
        return not (self.names or self.classes or self.stream or self.definitions)


class Pieces(NamedTuple):
    """A skeleton of which each piece is one whole msgpack object; without tables, the tree is all."""

    tables: bytes
    composites: memoryview
    tree: memoryview


def is_long(parsed: Parsed) -> bool:
    """Whether there is room for so many keys that it matters how they were chosen."""
    return len(parsed.tree) > _SHORT_BYTES or len(parsed.composites) > _SHORT_BYTES


def short_plain(skeleton: bytes | memoryview) -> Parsed | None:
    """A skeleton that is a short tree and nothing else; ``None`` if it is anything else, or malformed."""
    if 1 < len(skeleton) <= _SHORT_BYTES and skeleton[0] == PLAIN:
        return Parsed(memoryview(skeleton)[1:], True, True)
    return None


def split(skeleton: bytes | memoryview) -> Pieces:
    """Take a skeleton apart without looking into its pieces.

    Raises:
        DecodeError: it is malformed.
    """
    try:
        view = memoryview(skeleton).cast("B")
        if len(view) and view[0] == PLAIN:
            pieces = Pieces(b"", view[:0], view[1:])
        else:
            tag, tables_bytes, composites_bytes = _HEADER.unpack_from(view)
            composites_at = _HEADER.size + tables_bytes
            tree_at = composites_at + composites_bytes
            if tag != TABLES or not tables_bytes or tree_at > len(view):
                raise ValueError("unknown format or lengths")
            tables = view[_HEADER.size : composites_at]
            pieces = Pieces(tables.tobytes(), view[composites_at:tree_at], view[tree_at:])
        for piece in pieces:
            # How much a list may claim grows with the piece, so that a short one needs no second look.
            if len(piece) > _SHORT_BYTES:
                check_whole(piece)
        return pieces
    except Exception as error:
        raise DecodeError(f"the skeleton is malformed: {type(error).__name__}: {error}") from error


def parse(pieces: Pieces) -> Parsed:
    """Look into a skeleton without building anything of it.

    Raises:
        DecodeError: it is malformed.
    """
    if not pieces.tables:
        return Parsed(pieces.tree)
    try:
        return _parse_tables(pieces)
    except Exception as error:
        raise DecodeError(f"the skeleton is malformed: {type(error).__name__}: {error}") from error


def _parse_tables(pieces: Pieces) -> Parsed:
    tables, composites, tree = pieces
    memory, names, classes, stream, definitions = unpack(tables, _table_leaf)
    if not (_are(names, str) and _are(classes, list) and _is_count(definitions) and bool(names) == bool(composites)):
        raise ValueError("tables of the wrong types")
    if stream is not None:
        at, leaves, buffers = stream
        if not (_is_count(at) and _is_count(leaves) and _are(buffers, int)):
            raise ValueError("a wrong description of the pickle stream")
        stream = Stream(at, leaves, buffers)
    return Parsed(tree, False, False, memory, tuple(names), tuple(classes), stream, definitions, composites)


def _are(items: Any, kind: type) -> bool:
    return type(items) is list and (not items or set(map(type, items)) == {kind})


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
