"""Forged sizes, shapes and strides: nothing is allocated by what they say, and no memory is left."""

from __future__ import annotations

import struct
from zlib import crc32

from msgpack import ExtType

from objcomm.codec import codes
from objcomm.config import Trust
from objcomm.wire.bundle import read_bundle
from objcomm.wire.frame import HEADER_BYTES, Content, Kind, read_body, read_header
from objcomm.wire.notice import unpack_notice

from .common import (
    COMPLEX64,
    FLOAT32,
    INT64,
    MEMORY,
    TERMS,
    UINT8,
    attack,
    composite,
    mark,
    message,
    packed,
    receive,
    tensor,
)


def _head(**fields: int) -> bytes:
    """A whole frame whose header says something else than what follows it."""
    frame = bytearray(Content(Kind.DATA, 0, b"", b"\0\xc0").head(0, TERMS))
    places = {"skeleton": (16, "<Q"), "inline": (24, "<Q"), "segments": (32, "<Q"), "count": (40, "<I")}
    for name, value in fields.items():
        place, form = places[name]
        struct.pack_into(form, frame, place, value)
    struct.pack_into("<I", frame, HEADER_BYTES - 8, crc32(frame[: HEADER_BYTES - 8]))
    return bytes(frame)


def _arrive(frame: bytes) -> object:
    header = read_header(memoryview(frame.ljust(TERMS.window, b"\0")), TERMS)
    return read_body(memoryview(frame), header)


@attack()
def size_of_a_head(trust: Trust) -> object:
    return _arrive(_head(skeleton=(1 << 64) - 100))


@attack()
def size_of_an_inline_area(trust: Trust) -> object:
    return _arrive(_head(inline=1 << 62))


@attack()
def size_of_segments(trust: Trust) -> object:
    return _arrive(_head(segments=1 << 63, count=1))


@attack()
def number_of_segments(trust: Trust) -> object:
    return _arrive(_head(count=(1 << 32) - 1))


@attack()
def lists_that_claim_to_be_long(trust: Trust) -> object:
    """Each of 1,000 nested lists claims 4 billion items; msgpack makes a list before it looks for them."""
    return unpack_notice(memoryview((b"\xdd\xff\xff\xff\xff" * 1000).ljust(60_000, b"\0")))


@attack()
def lists_in_a_bundle_that_claim_to_be_long(trust: Trust) -> object:
    index = (b"\xdd" + struct.pack(">I", 3_000_000)) * 1000
    return read_bundle(memoryview(struct.pack("<BI", 2, 4 << 20) + index.ljust(4 << 20, b"\0")), 0)


@attack()
def lists_in_a_tree_that_claim_to_be_long(trust: Trust) -> object:
    tree = (b"\xdd" + struct.pack(">I", 3_000_000)) * 1000
    return receive(message(tree.ljust(4 << 20, b"\0")), trust)


@attack()
def tensor_without_bytes_behind_it(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(FLOAT32, [1 << 40])], [0], [], []]), trust, 16)


@attack()
def shape_whose_product_overflows(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(FLOAT32, [1 << 33, 1 << 33])], [0], [], []]), trust, 16)


@attack()
def stride_outside_of_the_memory(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(FLOAT32, [4], [1 << 20])], [0], [], []]), trust, 16)


@attack()
def negative_stride(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(FLOAT32, [4], [-4])], [0], [], []]), trust, 16)


@attack()
def view_outside_of_shared_memory(trust: Trust) -> object:
    table = [[tensor(FLOAT32, [4])], [0, 0], [[16, 0, 0, 0, 1, 8]], []]
    return receive(message(MEMORY[:2], memory=table), trust, 16)


@attack()
def spread_memory_of_a_huge_extent(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(FLOAT32, [4])], [0], [[1 << 45, 1, 0, 0]], []]), trust, 16)


@attack()
def nested_tensor_outside_of_its_values(trust: Trust) -> object:
    """The values are one element that is shown a million times: what is nested looks at the memory, not at the view."""
    forms = [tensor(FLOAT32, [1 << 20], [0]), tensor(INT64, [1, 1]), tensor(INT64, [1, 1]), tensor(INT64, [1])]
    return receive(composite("tensor.nested", [*MEMORY[:4], False], forms), trust)


@attack()
def nested_tensor_with_methods_of_its_own(trust: Trust) -> object:
    """Sizes whose ``tolist`` is ``list``: then nothing is left that could be found to be too large."""
    names = ["tensor.attributes"] * 3 + ["tensor.nested"]
    hidden = {"tolist": mark(codes.TUPLE)}
    forms = [tensor(FLOAT32, [1]), tensor(INT64, [1, 1]), tensor(INT64, [1, 1]), tensor(INT64, [1])]
    parts = [[MEMORY[index], hidden] for index in (1, 2, 3)] + [[MEMORY[0], *MEMORY[1:4], False]]
    return receive(message([], memory=[forms, [0, 1, 2, 3], [], []], names=names, composites=parts), trust)


@attack()
def jagged_rows_whose_sum_overflows(trust: Trust) -> object:
    """One row that starts at 2 ** 62 and ends at a negative offset: its length, and its end, come out as allowed."""
    forms = [tensor(FLOAT32, [2]), tensor(INT64, [2])]
    offsets = struct.pack("<8x56x2q", 1 << 62, -(1 << 63) + 5)
    return receive(composite("tensor.jagged", [*MEMORY[:2], None, None, None, 1, False], forms), trust, offsets)


@attack()
def quantized_tensor_without_memory(trust: Trust) -> object:
    forms = [tensor(UINT8, [1]), tensor(FLOAT32, [1 << 40], [0]), tensor(INT64, [1 << 40], [0])]
    dtype = ExtType(codes.TORCH_NAME, b"torch.quint8")
    return receive(composite("tensor.quantized", [MEMORY[0], dtype, [1 << 40], *MEMORY[1:3], 0], forms), trust)


@attack()
def copy_of_one_element_shown_often(trust: Trust) -> object:
    return receive(composite("tensor.mkldnn", [MEMORY[0], False], [tensor(FLOAT32, [1 << 34], [0])]), trust, 4)


@attack()
def indices_shown_often(trust: Trust) -> object:
    forms = [tensor(INT64, [1, 1 << 40], [0, 0]), tensor(FLOAT32, [1 << 40], [0])]
    return receive(composite("tensor.sparse_coo", [*MEMORY[:2], [10], False, False], forms), trust)


@attack()
def conjugate_of_what_is_not_complex(trust: Trust) -> object:
    return receive(composite("tensor.bits", [MEMORY[0], True, False, False], [tensor(FLOAT32, [4])]), trust, 16)


@attack()
def storage_of_a_view(trust: Trust) -> object:
    return receive(composite("tensor.storage", [MEMORY[0]], [tensor(UINT8, [1 << 40], [0])]), trust, 1)


@attack()
def gradient_of_what_has_none(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(INT64, [4], None, 1)], [0], [], []]), trust, 32)


@attack()
def bits_that_no_tensor_has(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[tensor(COMPLEX64, [2], [7])], [0], [], []]), trust, 16)


@attack()
def dtype_of_numpy_that_divides_by_zero(trust: Trust) -> object:
    return receive(message(MEMORY[0], memory=[[["<m8[5s/0]", 0, [2], None]], [0], [], []]), trust, 16)


@attack()
def item_of_numpy_that_overflows(trust: Trust) -> object:
    field = ["a", None, 0, "<d"]
    spec = [[[[8, 0, [field]], [1 << 20]], [1 << 20]], [1 << 20]]
    return receive(message(MEMORY[0], memory=[[[spec, 0, [1], None]], [0], [], []]), trust, 16)


@attack()
def bytes_as_a_shape(trust: Trust) -> object:
    return receive(packed(b"no skeleton at all"), trust)
