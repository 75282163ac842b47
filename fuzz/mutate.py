"""Changes of an input that keep its outer form: a skeleton stays msgpack, a frame stays a frame."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack
from msgpack import ExtType

_NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 127, 255, 256, 4095, 65535, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40),
    *(1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 63), (1 << 61) - 1, 1 << 61),
)
_CODES = (*range(8), *range(16, 31), *range(64, 81), 100, 127)
_NAMES = (
    *("<f8", "<m8[5s]", "|S3", "|V2", "torch.float32", "cpu", "meta", "Europe/Berlin", "tests.values", "Frozen"),
    *("dataclass", "namedtuple", "enum", "flag", "Pair", "key", "value", "int", "list", "numel", "RED", "Color"),
    *("tensor.sparse_coo", "tensor.quantized", "tensor.nested", "tensor.attributes", "tensor.meta", "tensor.bits"),
    *("tensor.jagged", "tensor.mkldnn", "tensor.sparse_compressed", "tensor.storage", "tensor.uninitialized"),
)


def _leaf(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return ExtType(rng.choice(_CODES), bytes(rng.randrange(256) for _ in range(rng.choice((0, 1, 1, 2, 4, 9)))))
    if kind == 2:
        return rng.choice(_NAMES)
    if kind == 3:
        return ExtType(rng.choice((20, 21, 22, 25, 30)), rng.choice(_NAMES).encode())
    if kind == 4:
        return rng.choice((None, True, False, 0.5, float("nan"), float("inf"), b"", b"abc", ""))
    if kind == 5:
        return [ExtType(rng.choice(range(64, 81)), b"")]
    if kind == 6:
        return []
    return rng.randrange(1 << rng.choice((3, 8, 16, 32)))


def _places(node: Any, found: list[tuple[Any, Any]], depth: int = 0) -> None:
    """All lists and dicts with their keys: where something else may be put."""
    if depth > 40 or len(found) > 2000:
        return
    if type(node) is list:
        for index, item in enumerate(node):
            found.append((node, index))
            _places(item, found, depth + 1)
    elif type(node) is dict:
        for key, item in node.items():
            found.append((node, key))
            _places(item, found, depth + 1)


def _change(root: list[Any], rng: random.Random) -> None:
    places: list[tuple[Any, Any]] = []
    _places(root, places)
    parent, key = rng.choice(places)
    action = rng.randrange(8)
    if type(parent) is list and action == 0 and parent is not root:
        del parent[key]
    elif type(parent) is list and action == 1 and parent is not root:
        parent.insert(key, _leaf(rng))
    elif type(parent) is list and action == 2 and parent is not root:
        parent.insert(key, parent[key])
    elif action == 3:
        other, its = rng.choice(places)
        if other is not root:
            parent[key] = other[its]
    elif action == 4 and type(parent[key]) is int:
        parent[key] = max(-(1 << 63), min((1 << 64) - 1, parent[key] + rng.choice((-1, 1, 64, -64))))
    elif action == 5 and type(parent[key]) is ExtType and parent[key].data:
        data = bytearray(parent[key].data)
        data[rng.randrange(len(data))] = rng.randrange(256)
        parent[key] = ExtType(parent[key].code, bytes(data))
    elif action == 6:
        parent[key] = [parent[key]]
    else:
        parent[key] = _leaf(rng)


def _unpack(blob: bytes) -> Any:
    return msgpack.unpackb(blob, strict_map_key=False, unicode_errors="surrogatepass")


def tree(blob: bytes, rng: random.Random) -> bytes:
    """A msgpack object with some of it changed; as it is if it is none."""
    try:
        root = [_unpack(blob)]
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _change(root, rng)
        return bytes(msgpack.packb(root[0], unicode_errors="surrogatepass"))
    except Exception:
        return blob


def skeleton(data: bytes, rng: random.Random) -> bytes:
    """The input of the target ``skeleton``: one of its pieces changed."""
    if len(data) < 5:
        return data
    choice, tables, composites = struct.unpack_from("<BHH", data)
    extra = 1 if choice & 2 else 0
    head, body = data[5 : 5 + extra], data[5 + extra :]
    if choice & 2 or choice & 1:
        return data[: 5 + extra] + tree(body, rng)
    tables = min(tables, len(body))
    composites = min(composites, len(body) - tables)
    pieces = [body[:tables], body[tables : tables + composites], body[tables + composites :]]
    which = rng.choice([index for index, piece in enumerate(pieces) if piece] or [2])
    pieces[which] = tree(pieces[which], rng)
    if max(len(pieces[0]), len(pieces[1])) > 65535:
        return data
    return struct.pack("<BHH", choice, len(pieces[0]), len(pieces[1])) + head + b"".join(pieces)


def table(data: bytes, rng: random.Random) -> bytes:
    """The input of the target ``table``."""
    if not data:
        return data
    tables, rest = data[1 : 1 + data[0]], data[1 + data[0] :]
    if rng.random() < 0.8:
        changed = tree(tables, rng)
        tables = changed if len(changed) < 256 else tables
    else:
        rest = tree(rest, rng)
    return bytes([len(tables)]) + tables + rest


def raw(data: bytes, rng: random.Random) -> bytes:
    """Any input: bytes changed, removed, repeated, inserted."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(changed)) if changed else 0
        action = rng.randrange(5)
        if action == 0 and changed:
            changed[at] = rng.randrange(256)
        elif action == 1 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif action == 2:
            del changed[at : at + rng.choice((1, 1, 4, 16))]
        elif action == 3:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 8))))
        else:
            changed[at:at] = changed[at : at + rng.choice((1, 8, 64))]
    return bytes(changed)


MUTATORS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "skeleton": skeleton,
    "table": table,
    "frame": raw,
    "store": raw,
    "notice": tree,
}
