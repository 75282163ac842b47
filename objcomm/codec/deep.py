"""Rewrites a scanned object into what msgpack packs as it is: for the objects that the scan alone cannot serve.

That is what msgpack would mistake for another type (a bytearray, say), nesting beyond msgpack's limit, containers that
repeat so often that writing each occurrence would explode, instances of dataclasses that occur twice and stay one, and
containers that contain themselves. Parts that are too deep or repeated are *defined* once, in front of the tree, and
referred to; a container on a cycle is pickled.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from . import codes
from .codes import Part, ext, indexed
from .levels import SCALARS
from .scan import Scan

_MAX_HEIGHT = 100  # levels of one definition
_WORTH_SHARING = 32  # parts from which on a repeated container is defined instead of written again
_LONG_TEXT = 1 << 30  # characters; msgpack ends at 4 GiB of UTF-8

_DICT = ext(codes.DICT)
_DEFINITION = ext(codes.DEFINITION)


class Later:
    """A container on a cycle: a leaf of the pickle stream if it is packed, and not if only other leaves hold it."""

    __slots__ = ("obj", "part")

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self.part: Part = None


class _Node:
    """A container: what comes first in its list, the keys if it stays a dict, and its items."""

    __slots__ = ("count", "cyclic", "depth", "head", "height", "items", "keys", "lowest", "obj", "one", "part", "size")

    def __init__(self, obj: Any, head: list[Part], keys: list[Any] | None, items: list[Any], depth: int) -> None:
        self.obj, self.head, self.keys, self.items, self.depth = obj, head, keys, items, depth
        self.lowest = depth  # of the containers around this one that occur inside of it, the outermost one's depth
        self.cyclic = False
        self.count = 0  # occurrences, as far as they matter: none, one, several
        self.one = False  # whether it has to stay one object
        self.part: Part = None
        self.size = 1
        self.height = 0


class Rewriter:
    """Rewrites one object.

    Args:
        share: whether definitions may be made; without them the object has to be shallow and small.

    Attributes:
        definitions: of the parts referred to, each in front of those that refer to it.
    """

    def __init__(self, scan: Scan, *, share: bool = True) -> None:
        self._scan = scan
        self._share = share
        self._nodes: dict[int, _Node] = {}
        self._repeated: set[int] = set()
        self.definitions: list[Part] = []

    def rewrite(self, root: Any) -> Part:
        top = self._node(root, 0)
        if top is None:
            return self._leaf(root)
        order = self._inside_out(top)
        if self._share and self._scan.dataclasses:
            self._count(order)
        for node in order:
            self._finish(node)
        return top.part

    def part(self, obj: Any) -> Part:
        """What msgpack packs in place of what a rewritten object still holds that it has no type for."""
        if type(obj) is not Later:
            return self._scan.part(obj)
        if obj.part is None:
            obj.part = self._scan.pickled_later(obj.obj)
        return obj.part

    def _node(self, obj: Any, depth: int) -> _Node | None:
        """A node for a container, None for anything else."""
        kind = type(obj)
        if kind is list:
            return _Node(obj, [], None, list(obj), depth)
        if kind is dict:
            if SCALARS.issuperset(map(type, obj)):
                return _Node(obj, [], list(obj), list(obj.values()), depth)
            return _Node(obj, [_DICT], None, list(chain.from_iterable(obj.items())), depth)
        part = self._scan.known(obj)
        return _Node(obj, part[:1], None, part[1:], depth) if type(part) is list else None

    def _leaf(self, obj: Any) -> Part:
        kind = type(obj)
        if kind is bytes:
            part = self._scan.known(obj)
            return obj if part is None else part
        if kind is str and len(obj) >= _LONG_TEXT:
            return indexed(codes.BIG_TEXT, self._scan.memory.add_bytes(obj.encode("utf-8", "surrogatepass")))
        return obj if kind in SCALARS else self._scan.part(obj)

    def _inside_out(self, top: _Node) -> list[_Node]:
        """All containers, each after those inside of it; notes which occur again and which contain themselves."""
        order: list[_Node] = []
        self._nodes[id(top.obj)] = top
        path = [(top, iter(top.items))]
        around = {id(top.obj)}
        while path:
            node, items = path[-1]
            for item in items:
                if type(item) in SCALARS:
                    continue
                key = id(item)
                known = self._nodes.get(key)
                if known is None:
                    fresh = self._node(item, len(path))
                    if fresh is not None:
                        self._nodes[key] = fresh
                        around.add(key)
                        path.append((fresh, iter(fresh.items)))
                        break
                elif key in around:
                    known.cyclic = True
                    node.lowest = min(node.lowest, known.depth)
                else:
                    self._repeated.add(key)
            else:
                path.pop()
                around.discard(id(node.obj))
                order.append(node)
                if path:
                    path[-1][0].lowest = min(path[-1][0].lowest, node.lowest)
        return order

    def _count(self, order: list[_Node]) -> None:
        """Find the instances that would be built more than once: they, or something around them, occur again."""
        order[-1].count = 1
        for node in reversed(order):
            node.one = node.count > 1 and type(node.obj) in self._scan.dataclasses
            times = 1 if node.one else node.count
            for item in node.items:
                inner = None if type(item) in SCALARS else self._nodes.get(id(item))
                if inner is not None:
                    inner.count = min(2, inner.count + times)

    def _finish(self, node: _Node) -> None:
        if node.cyclic or node.lowest < node.depth:
            node.part = Later(node.obj)
            return
        parts = node.head
        for item in node.items:
            inner = None if type(item) in SCALARS else self._nodes.get(id(item))
            if inner is None:
                parts.append(self._leaf(item))
                node.size += 1
            else:
                parts.append(inner.part)
                node.size += inner.size
                node.height = max(node.height, inner.height + 1)
        node.part = parts if node.keys is None else dict(zip(node.keys, parts, strict=True))
        repeated = node.size >= _WORTH_SHARING and id(node.obj) in self._repeated
        if self._share and (node.one or repeated or node.height >= _MAX_HEIGHT):
            self.definitions.append([_DEFINITION, node.part])
            node.part = indexed(codes.SHARED, len(self.definitions) - 1)
            node.size, node.height = 1, 0
