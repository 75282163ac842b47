"""Where in a received object the part is that cannot be built: the skeleton is gone through again, step by step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from ..errors import DecodeError, ObjcommError
from . import codes, skeleton
from .allowance import current
from .build import Builder
from .path import ROOT, reason, show_received


@dataclass(frozen=True)
class _Leaf:
    code: int
    data: bytes


class _Pairs(list[Any]):
    """A dict, as pairs: what its keys become is not known yet."""


class _Failed(Exception):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path


class _TooLong(Exception):
    """The path cannot be found in reasonable time."""


def decoding_error(error: Exception, parsed: skeleton.Parsed, builder: Builder | None) -> ObjcommError:
    """The error to raise for a message that cannot be built. ``builder`` is as the error left it."""
    if not isinstance(error, ObjcommError):
        error = DecodeError(f"the object cannot be rebuilt: {reason(error)}")
    if error.path is None and builder is not None:
        try:
            # What is rebuilt once more is limited once more.
            error.path = copy_context().run(_path, parsed, builder)
        except Exception:
            error.path = None  # of a malformed skeleton, say
    return error


def _path(parsed: skeleton.Parsed, builder: Builder) -> str | None:
    current.set(builder)
    return _Outline(parsed, builder).path()


def locate(error: ObjcommError, parsed: skeleton.Parsed, codes_: tuple[int, ...], index: int) -> ObjcommError:
    """The error, with the path of the first part that has one of the codes and the index."""
    try:
        outline = _Outline(parsed, None)
        paths = (outline.find(_Leaf(code, codes.number(index))) for code in codes_)
        error.path = next((path for path in paths if path is not None), None)
    except Exception:
        error.path = None
    return error


class _Outline:
    """The tree of a message with its leaves left as they are.

    Looking for something takes so many steps as there are parts, however often they are referred to; after a few times
    that many it is given up.
    """

    def __init__(self, parsed: skeleton.Parsed, builder: Builder | None) -> None:
        self._parsed = parsed
        self._builder = builder
        self._steps = 10_000 + 8 * (len(parsed.tree) + len(parsed.composites))
        tree = skeleton.unpack(parsed.tree, _Leaf, None, _Pairs)
        self._root = tree[-1] if parsed.definitions else tree
        self._definitions = [body[1] for body in tree[:-1]] if parsed.definitions else []

    def path(self) -> str | None:
        builder = self._builder
        assert builder is not None
        if len(builder.composites) < len(self._parsed.names):
            return self.find(_Leaf(codes.COMPOSITE, codes.number(len(builder.composites))))
        if self._parsed.stream is not None and len(builder.opaque) < self._parsed.stream.leaves:
            return self.find(_Leaf(codes.OPAQUE, codes.number(len(builder.opaque))))
        builder.restart()
        failed_in = None
        try:
            for index, body in enumerate(self._definitions):
                failed_in = index
                builder.shared.append(self._build(body, ""))
            failed_in = None
            self._build(self._root, ROOT)
        except _Failed as failed:
            if failed_in is None:
                return failed.path
            return (self.find(_Leaf(codes.SHARED, codes.number(failed_in))) or ROOT) + failed.path
        return None

    def find(self, leaf: _Leaf) -> str | None:
        """The path of the first part that is a leaf, through shared definitions if need be."""
        found = self._search(self._root, {leaf}, ROOT, set())
        if found is None and leaf.code == codes.COMPOSITE:
            # It is part of a later one, such as what several objects travel in together.
            bodies = skeleton.unpack(self._parsed.composites, _Leaf, None, _Pairs)
            wanted = {leaf}
            start = int.from_bytes(leaf.data, "little") + 1
            for index, body in enumerate(bodies[start:], start):
                if any(self._search(part, wanted, "", set()) is not None for part in body[1:]):
                    wanted.add(_Leaf(codes.COMPOSITE, codes.number(index)))
            found = self._search(self._root, wanted, ROOT, set())
        return found

    def _search(self, node: Any, wanted: set[_Leaf], path: str, seen: set[int]) -> str | None:
        self._step()
        head = node[0] if type(node) is list and node else None
        marked = type(head) is _Leaf and head.code >= codes.TUPLE
        if (type(node) is _Leaf and node in wanted) or (marked and head in wanted):
            return path
        if type(node) is _Leaf and node.code == codes.SHARED:
            index = int.from_bytes(node.data, "little")
            if index in seen or index >= len(self._definitions):
                return None
            seen.add(index)
            return self._search(self._definitions[index], wanted, path, seen)
        for label, child in self._children(node):
            found = self._search(child, wanted, path + label, seen)
            if found is not None:
                return found
        return None

    def _step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise _TooLong

    def _build(self, node: Any, path: str) -> Any:
        assert self._builder is not None
        self._step()
        built = {id(child): self._build(child, path + label) for label, child in self._children(node)}
        try:
            if type(node) is _Leaf:
                return self._builder.leaf(node.code, node.data)
            if type(node) is _Pairs:
                return self._builder.pairs([(built[id(key)], built[id(value)]) for key, value in node])
            if type(node) is list:
                items = [built[id(child)] if id(child) in built else self._build(child, path) for child in node]
                return self._builder.array(items)
            return node
        except (_Failed, _TooLong):
            raise
        except Exception as error:
            raise _Failed(path) from error

    def _children(self, node: Any) -> list[tuple[str, Any]]:
        if type(node) is _Pairs:
            return [pair for key, value in node for pair in self._entry(key, value)]
        if type(node) is not list:
            return []
        head = node[0] if node else None
        if type(head) is not _Leaf or head.code < codes.TUPLE:
            return [(f"[{index}]", child) for index, child in enumerate(node)]
        labels = self._labels(head)
        if labels is None:
            first = 2 if head.code == codes.DEFAULT_DICT else 1
            entries = zip(node[first::2], node[first + 1 :: 2], strict=True)
            factory = [(".default_factory", child) for child in node[1:first]]
            return [*factory, *(pair for key, value in entries for pair in self._entry(key, value))]
        return [(labels(index), child) for index, child in enumerate(node[1:])]

    def _entry(self, key: Any, value: Any) -> list[tuple[str, Any]]:
        text = "?"
        if type(key) not in (_Leaf, _Pairs, list):
            text = show_received(key)
        elif self._builder is not None and type(key) is not _Pairs:
            with suppress(_Failed):
                text = show_received(self._build(key, ""))
        return [(f".key({text})", key), (f"[{text}]", value)]

    def _labels(self, head: _Leaf) -> Callable[[int], str] | None:
        """How the items after a mark are reached; None if they are keys and values."""
        if head.code in (codes.DICT, codes.ORDERED_DICT, codes.DEFAULT_DICT):
            return None
        if head.code == codes.INSTANCE:
            kind, _, _, fields, *names = self._parsed.classes[int.from_bytes(head.data, "little")]
            attributes = names[0] if kind == "dataclass" and names[0] is not None else fields
            return lambda index: f".{attributes[index]}" if index < len(attributes) else f"[{index}]"
        if head.code in (codes.SET, codes.FROZENSET):
            return lambda index: ".element(?)"
        if head.code == codes.NAMED:
            return lambda index: "" if index else ".keys()"
        if head.code == codes.DEQUE:
            return lambda index: ".maxlen" if index == 0 else f"[{index - 1}]"
        return lambda index: f"[{index}]"
