"""A few bytes that ask for much: memory, time or stack out of proportion to what was sent."""

from __future__ import annotations

import struct
from typing import Any

from msgpack import ExtType

import tests.values  # noqa: F401  a receiver has some dataclasses
from objcomm.codec import codes
from objcomm.config import Trust

from .common import FLOAT32, MEMORY, attack, leaf, mark, message, packed, receive, tensor

FROZEN = ["dataclass", "tests.values", "FrozenSlotted", ["a"], None]
PRIME = (1 << 61) - 1  # hashes of numbers are remainders of it


def _instance(*values: Any) -> list[Any]:
    return mark(codes.INSTANCE, *values, data=b"")


def _int(value: int) -> ExtType:
    return ExtType(codes.INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _shared(index: int) -> ExtType:
    return leaf(codes.SHARED, index)


# -- time --------------------------------------------------------------------------------------------------------------


@attack("restricted")
def integers_of_one_hash(trust: Trust) -> object:
    keys = [_int(PRIME * (index + 2)) for index in range(30_000)]
    return receive(message(mark(codes.SET, *keys)), trust)


@attack("restricted")
def integers_of_one_hash_in_a_map(trust: Trust) -> object:
    keys = [_int(PRIME * (index + 2)) for index in range(30_000)]
    body = b"".join(packed(key) + b"\xc0" for key in keys)
    return receive(message(b"\xdf" + struct.pack(">I", len(keys)) + body), trust)


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers whose tuples have one hash: the second is computed from the first."""
    mask, one, two, five = (1 << 64) - 1, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x27D4EB2F165667C5
    back = pow(two, -1, 1 << 64)

    def turned(lane: int) -> int:
        return ((lane << 31) | (lane >> 33)) & mask

    found: list[tuple[int, int]] = []
    wanted = 12345
    first = 0
    while len(found) < count:
        first += 1
        lane = turned((five + first * two) & mask) * one & mask
        second = (wanted - lane) * back & mask
        if second < PRIME:
            found.append((first, second))
    return found


@attack("restricted")
def tuples_of_one_hash(trust: Trust) -> object:
    pairs = colliding_pairs(30_000)
    assert len({hash(pair) for pair in pairs}) == 1
    keys = [mark(codes.TUPLE, *pair) for pair in pairs]
    return receive(message(mark(codes.DICT, *[item for key in keys for item in (key, None)])), trust)


@attack("restricted")
def key_that_doubles_with_every_definition(trust: Trust) -> object:
    """A hash of it takes 2 ** 60 steps."""
    bodies = [_instance(1)]
    for index in range(60):
        bodies.append(_instance(mark(codes.TUPLE, _shared(index), _shared(index))))
    return receive(message(mark(codes.SET, _shared(60)), classes=[FROZEN], definitions=bodies), trust)


@attack("restricted")
def long_integer_against_a_decimal(trust: Trust) -> object:
    """To be compared the integer is converted, which takes the square of its length."""
    number = _int(7 + PRIME * (1 << 8_000_000))
    return receive(message(mark(codes.SET, ExtType(codes.DECIMAL, b"7"), number)), trust, max_bytes=1 << 30)


@attack()
def path_of_an_error_among_definitions(trust: Trust) -> object:
    """Every definition refers to all before it, none is used, and the last cannot be built."""
    bodies: list[Any] = [[ExtType(codes.BUILTIN, b"int")]]
    for index in range(1, 60):
        bodies.append([_shared(before) for before in range(index)])
    bodies.append([ExtType(codes.BUILTIN, b"no such type")])
    return receive(message([], definitions=bodies), trust)


@attack()
def path_of_an_error_in_keys_of_keys(trust: Trust) -> object:
    blob = b"\x81" * 300 + b"\xc0" * 301
    return receive(message(blob), trust)


@attack()
def definitions_that_refer_to_themselves(trust: Trust) -> object:
    return receive(message([], definitions=[[_shared(index % 40)] for index in range(40)]), trust)


# -- memory ------------------------------------------------------------------------------------------------------------


@attack()
def empty_tensors_of_one_byte_each(trust: Trust) -> object:
    table = [[tensor(FLOAT32, [0])], [0] * 600_000, [], []]
    return receive(message(MEMORY[0], memory=table), trust)


@attack()
def tensors_of_many_dimensions(trust: Trust) -> object:
    table = [[tensor(FLOAT32, [0] * 250)], [0] * 100_000, [], []]
    return receive(message(MEMORY[0], memory=table), trust)


@attack()
def bytes_referred_to_again_and_again(trust: Trust) -> object:
    tree = [leaf(codes.BIG_BYTEARRAY, 0)] * 100_000
    return receive(message(tree, memory=[[[-1, 0, [1 << 19], None]], [0], [], []]), trust, 1 << 19)


@attack()
def record_referred_to_again_and_again(trust: Trust) -> object:
    tree = [mark(codes.NUMPY_RECORD, MEMORY[0])] * 100_000
    spec = [1 << 19, 0, [["a", None, 0, f"|S{1 << 19}"]]]
    return receive(message(tree, memory=[[[spec, 0, [], None]], [0], [], []]), trust, 1 << 19)


@attack()
def tensor_as_part_of_thousands(trust: Trust) -> object:
    count = 4000
    table = [[tensor(FLOAT32, [1 << 16])], [0], [], []]
    names = ["tensor.mkldnn"] * count
    return receive(message([], memory=table, names=names, composites=[[MEMORY[0], False]] * count), trust, 1 << 18)


# -- stack -------------------------------------------------------------------------------------------------------------


@attack()
def arrays_in_arrays(trust: Trust) -> object:
    return receive(message(b"\x91" * 1_000_000 + b"\xc0"), trust)


@attack()
def arrays_in_arrays_of_a_notice(trust: Trust) -> object:
    from objcomm.wire.notice import unpack_notice

    return unpack_notice(memoryview(b"\x91" * 4000 + b"\xc0"))


def _chain(make: Any, levels: int, count: int) -> list[Any]:
    """Definitions of nested containers, each around the one before."""
    bodies: list[Any] = []
    for index in range(count):
        body: Any = _shared(index - 1) if index else 1
        for _ in range(levels):
            body = make(body)
        bodies.append(body)
    return bodies


@attack()
def slices_in_slices(trust: Trust) -> object:
    """Freed by a recursion in C: without a limit the process ends when they are dropped."""
    bodies = _chain(lambda inner: mark(codes.SLICE, inner, None, None), 500, 500)
    return receive(message(_shared(499), definitions=bodies), trust)


@attack()
def deques_in_deques(trust: Trust) -> object:
    bodies = _chain(lambda inner: mark(codes.DEQUE, None, inner), 500, 500)
    return receive(message(_shared(499), definitions=bodies), trust)


@attack()
def defaultdicts_in_defaultdicts(trust: Trust) -> object:
    bodies = _chain(lambda inner: mark(codes.DEFAULT_DICT, None, 0, inner), 500, 300)
    return receive(message(_shared(299), definitions=bodies), trust)


@attack("restricted")
def tuples_in_tuples_as_a_key(trust: Trust) -> object:
    """A hash of it is a recursion in C."""
    bodies = _chain(lambda inner: mark(codes.TUPLE, inner), 500, 800)
    return receive(message(mark(codes.SET, _shared(799)), definitions=bodies), trust)
