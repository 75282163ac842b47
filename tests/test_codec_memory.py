"""The memory table: what travels of overlapping leaves, and that a table is checked before anything is allocated."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from objcomm.codec import tensors
from objcomm.codec.memory import MemoryReader
from objcomm.errors import DecodeError, EncodeError, LimitError
from tests.memory_loop import (
    assert_same_memory,
    bytes_sent,
    places,
    reader_of,
    take_apart,
    through,
)

_DTYPES = [torch.float32, torch.uint8, torch.int16, torch.float64, torch.complex64]


def _grid(rows: int = 64, columns: int = 48) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


# -- what travels --------------------------------------------------------------------------------------------------------


def _diagonal_and_row() -> tuple[list[Any], int]:
    x = _grid(40, 40)
    return [x.diagonal(), x[0]], 2 * 160


def _numpy_too() -> tuple[list[Any], int]:
    x = _grid()
    return [x, x.numpy(), x[3:], x.numpy()[::-1]], 64 * 48 * 4


COUNTED: dict[str, Callable[[], tuple[list[Any], int]]] = {
    "a view of a large storage": lambda: ([torch.zeros(1 << 16)[100:110]], 40),
    "a column": lambda: ([_grid()[:, 5]], 64 * 4),
    "every third": lambda: ([torch.arange(99)[::3]], 33 * 8),
    "transposed": lambda: ([_grid().t()], 64 * 48 * 4),
    "channels last": lambda: ([torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)], 120 * 4),
    "expanded": lambda: ([torch.randn(3, 1).expand(3, 1000)], 12),
    "expanded column": lambda: ([_grid()[:, :1].expand(64, 1000)], 64 * 4),
    "sliding windows": lambda: ([torch.arange(100).unfold(0, 10, 1)], 100 * 8),
    "a scalar of a matrix": lambda: ([_grid()[3, 4]], 4),
    "thirds of the last dimension": lambda: (list(_grid().chunk(3, -1)), 64 * 48 * 4),
    "two of three": lambda: (list(_grid().chunk(3, -1)[1:]), 64 * 32 * 4),
    "first and last column": lambda: ([_grid()[:, 0], _grid()[:, -1]], 2 * 64 * 4),
    "two columns of one": lambda: ((lambda x: [x[:, 0], x[:, -1]])(_grid()), 2 * 64 * 4),
    "columns of a large image": lambda: ((lambda x: [x[..., 0], x[..., 2]])(torch.zeros(300, 300, 40)), 720_000),
    "even and odd": lambda: ((lambda x: [x[::2], x[1::2]])(torch.arange(100)), 100 * 8),
    "steps of two and four": lambda: ((lambda x: [x[::4], x[2::12]])(torch.arange(120)), (30 + 10) * 8),
    "a column twice": lambda: ((lambda x: [x[:, 0], x[:, 0]])(_grid()), 64 * 4),
    "a column and its end": lambda: ((lambda x: [x[:, 0], x[9:, 0]])(_grid()), 64 * 4),
    "columns that overlap": lambda: ((lambda x: [x[:, 0:3], x[2:, 1:4]])(_grid()), 64 * 4 * 4),
    "a part twice": lambda: ((lambda x: [x[:9], x[:9], x[3:9]])(torch.arange(1000)), 72),
    "halves": lambda: ((lambda x: [x[:5], x[5:]])(torch.arange(10)), 80),
    "overlapping halves": lambda: ((lambda x: [x[:6], x[4:]])(torch.arange(10)), 80),
    "as integers": lambda: ((lambda x: [x, x.view(torch.int32)])(torch.randn(10)), 40),
    "complex and its parts": lambda: (
        (lambda x: [x, torch.view_as_real(x), x.real, x.imag])(torch.randn(10, dtype=torch.complex64)),
        80,
    ),
    "a diagonal and a row": _diagonal_and_row,
    "tensor and array": _numpy_too,
    "flipped": lambda: ([np.arange(100)[::-1]], 800),
    "flipped with gaps": lambda: ([np.arange(100)[::-2]], 400),
    "broadcast": lambda: ([np.broadcast_to(np.arange(3.0), (1000, 3))], 24),
    "a field": lambda: ([np.zeros(9, dtype=[("a", "i1"), ("b", "<f8")])["b"]], 72),
    "both fields": lambda: ((lambda x: [x["a"], x["b"]])(np.zeros(9, dtype=[("a", "i1"), ("b", "<f8")])), 81),
    "nothing": lambda: ([torch.empty(0), torch.empty(3, 0, 5), np.empty((0, 4))], 0),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("threshold", [1, 100, 1 << 19])
def test_only_what_is_shown_travels_and_sharing_stays(name: str, threshold: int) -> None:
    objs, expected = COUNTED[name]()
    assert bytes_sent(objs) == expected
    assert_same_memory(objs, through(objs, threshold))


def test_dense_memory_is_sent_from_where_it_is() -> None:
    x = torch.randn(64, 64)
    y = torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last)
    a = np.arange(1000).reshape(10, 100)
    memory, _ = take_apart([x.t(), y[1:], a.T, x[10:]], threshold=1)
    starts = [segment.data_ptr() for segment in memory.segments]
    assert sorted(starts) == sorted([x.data_ptr(), y[1:].data_ptr(), a.__array_interface__["data"][0]])


def test_an_independent_copy_is_not_tied_to_what_it_was_copied_from() -> None:
    x = torch.arange(10)
    a, b, c = through([x, x.clone(), x[3:]])
    a[5] = 100
    assert (a[5], b[5], c[2]) == (100, 5, 100)


def test_the_same_object_has_one_number() -> None:
    x, a = torch.ones(3), np.ones(3)
    memory, _ = take_apart([x, a, x, a])
    assert len(memory.table[1]) == 2


def test_what_lies_between_buffers_is_cleared() -> None:
    objs = [torch.ones(3), torch.ones(5, dtype=torch.bool), b"abc", np.ones(3), torch.ones(2000)]
    _, one = take_apart(objs)
    _, other = take_apart(objs)
    assert torch.equal(one, other)
    assert int((one == 0xAA).sum()) == 0


def _view(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    typed = base.view(rng.choice(_DTYPES))
    for _ in range(20):
        shape = [rng.choice([1, 2, 3, 4, 5, 0] if rng.random() < 0.1 else [1, 2, 3, 4]) for _ in range(rng.randint(0, 3))]
        strides = [rng.choice([0, 1, 2, 3, 4, 7, 8, 12, 16]) for _ in shape]
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True) if extent)
        if reach < typed.numel():
            return typed.as_strided(shape, strides, rng.randint(0, typed.numel() - reach - 1))
    return typed[:3]


def _some_views(rng: random.Random) -> list[Any]:
    bases = [torch.randint(0, 255, (rng.choice([64, 256, 1024]),), dtype=torch.uint8) for _ in range(rng.randint(1, 3))]
    objs: list[Any] = []
    for _ in range(rng.randint(1, 8)):
        view = _view(rng, rng.choice(bases))
        if rng.random() < 0.3:
            array = view.numpy()
            objs.append(np.flip(array, [axis for axis in range(array.ndim) if rng.random() < 0.4]))
        else:
            objs.append(view)
    if rng.random() < 0.3:
        grid = bases[0].view(torch.float32).view(-1, 8)
        step = rng.randint(1, 3)
        objs += [grid[:, first : first + rng.randint(1, 3)] for first in range(0, 8, step)]
    return objs


def test_random_views_keep_their_values_and_share_exactly_what_they_shared() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        objs = _some_views(rng)
        assert_same_memory(objs, through(objs, rng.choice([1, 32, 512, 1 << 19])))


def test_views_of_one_buffer_through_several_storages() -> None:
    buffer = bytearray(range(200))
    one = torch.frombuffer(buffer, dtype=torch.uint8, count=100)
    other = torch.frombuffer(buffer, dtype=torch.float32, count=20, offset=40)
    assert_same_memory([one, other], through([one, other]))
    odd = torch.frombuffer(buffer, dtype=torch.int16, count=20, offset=1)
    assert_same_memory([odd], through([odd]))
    assert_same_memory([one[3:], other, odd[2:4]], through([one[3:], other, odd[2:4]]))


def test_overlapping_views_that_cannot_all_be_aligned_are_refused() -> None:
    buffer = bytearray(200)
    even = torch.frombuffer(buffer, dtype=torch.int32, count=20)
    odd = torch.frombuffer(buffer, dtype=torch.int32, count=20, offset=1)
    with pytest.raises(EncodeError, match="aligned"):
        take_apart([even, odd])


# -- raw bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 17])
@pytest.mark.parametrize("threshold", [1, 1 << 19])
def test_raw_bytes_arrive_as_a_writable_view_of_their_own(size: int, threshold: int) -> None:
    data = random.Random(size).randbytes(size)
    words = memoryview(bytearray(data[: size // 8 * 8])).cast("d") if size >= 8 else b""
    received = through([data, bytearray(data), memoryview(data), words, torch.ones(3)], threshold)
    assert [bytes(each) for each in received[:4]] == [data, data, data, bytes(words)]
    for each in received[:4]:
        assert type(each) is memoryview and not each.readonly and each.format == "B"
    if size:
        received[0][0] ^= 0xFF
        assert bytes(received[1]) == data


def test_the_address_of_read_only_memory() -> None:
    writer_input = bytes(range(256)) * 10
    memory, _ = take_apart([writer_input], threshold=1)
    assert bytes(memory.segments[0].tolist()) == writer_input


# -- the areas that arrive -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1, 4, 8, 16, 60])
def test_an_inline_area_at_any_address(shift: int) -> None:
    x = torch.randn(100, dtype=torch.float64)
    objs = [x[:3], torch.ones(3), x, x[5:], np.ones(3), torch.ones(2000), *torch.ones(9, 2).unbind(), b"abc"]
    memory, inline = take_apart(objs)
    block = torch.zeros(memory.inline_bytes + 64, dtype=torch.uint8)
    moved = block[shift : shift + memory.inline_bytes]
    moved.copy_(inline)
    received = reader_of(memory).build(moved, [])
    assert_same_memory(objs[:-1], received[:-1])
    for each in received[:-1]:
        start = each.data_ptr() if isinstance(each, torch.Tensor) else each.ctypes.data
        assert start % each.dtype.itemsize == 0
    target = torch.zeros(memory.inline_bytes + 64, dtype=torch.uint8)[shift : shift + memory.inline_bytes]
    memory.write_inline(target)
    assert torch.equal(target, inline)


def test_sizes_other_than_announced_are_refused() -> None:
    memory, inline = take_apart([torch.ones(3), torch.ones(100)], threshold=64)
    reader = reader_of(memory)
    with pytest.raises(DecodeError, match="announced"):
        reader.build(inline[:-1], memory.segments)
    with pytest.raises(DecodeError, match="announced"):
        reader.build(inline, [])
    with pytest.raises(ValueError, match="inline area"):
        memory.write_inline(inline[:-1])


# -- malformed tables ------------------------------------------------------------------------------------------------------

_F32, _VEC = 0, [0, 0, [4], None]

MALFORMED: dict[str, tuple[Any, str]] = {
    "no list": ({}, "malformed"),
    "too short": ([[], [], []], "malformed"),
    "a form too short": ([[[0, 0, [4]]], [0], [], []], "malformed"),
    "unknown dtype": ([[[999, 0, [4], None]], [0], [], []], "dtype number 999"),
    "negative dtype": ([[[-7, 0, [4], None]], [0], [], []], "dtype number -7"),
    "bool as dtype": ([[[True, 0, [4], None]], [0], [], []], "dtype"),
    "negative extent": ([[[0, 0, [-4], None]], [0], [], []], "shape"),
    "float extent": ([[[0, 0, [4.0], None]], [0], [], []], "shape"),
    "bool extent": ([[[0, 0, [True], None]], [0], [], []], "shape"),
    "huge extent": ([[[0, 0, [1 << 63], None]], [0], [], []], "shape"),
    "huge product": ([[[0, 0, [1 << 40, 1 << 40], None]], [0], [], []], "counted"),
    "huge product with a zero": ([[[0, 0, [0, 1 << 40, 1 << 40], None]], [0], [], []], "counted"),
    "too many dimensions": ([[[0, 0, [1] * 300, None]], [0], [], []], "shape"),
    "negative stride": ([[[0, 0, [4], [-4]]], [0], [], []], "strides"),
    "broken stride": ([[[0, 0, [4], [3]]], [0], [], []], "strides"),
    "huge stride": ([[[0, 0, [4], [1 << 62]]], [0], [], []], "too large"),
    "stride beyond": ([[[0, 0, [4], [8]]], [0], [], []], "inline area"),
    "too few strides": ([[[0, 0, [4], []]], [0], [], []], "strides"),
    "bad flags": ([[[0, 64, [4], None]], [0], [], []], "flags"),
    "negative flags": ([[[0, -1, [4], None]], [0], [], []], "flags"),
    "grad of integers": ([[[4, 1, [2], None]], [0], [], []], "require grad"),
    "unknown form": ([[_VEC], [1], [], []], "form"),
    "negative form": ([[_VEC], [-1], [], []], "form"),
    "leaf of a wrong type": ([[_VEC], ["0"], [], []], "form"),
    "more than there is": ([[_VEC], [0, 0], [], []], "inline area"),
    "less than there is": ([[], [], [], []], "inline area"),
    "raw bytes of two dimensions": ([[[-1, 0, [4, 4], None]], [0], [], []], "raw bytes"),
    "raw bytes with flags": ([[[-1, 1, [16], None]], [0], [], []], "raw bytes"),
    "segments that are not there": ([[_VEC], [0], [], [0]], "segments"),
    "cluster too short": ([[_VEC], [0], [[16, 0]], []], "cluster"),
    "cluster of odd length": ([[_VEC], [0], [[16, 0, 0]], []], "cluster"),
    "cluster of an odd mode": ([[_VEC], [0], [[16, 2, 0, 0]], []], "cluster"),
    "cluster of nothing": ([[_VEC], [0], [[0, 0, 0, 0]], []], "cluster"),
    "huge cluster": ([[_VEC], [0], [[1 << 62, 0, 0, 0]], []], "cluster"),
    "cluster of no leaf": ([[_VEC], [0], [[16, 0, 1, 0]], []], "leaf 1"),
    "leaf twice in a cluster": ([[_VEC], [0], [[16, 0, 0, 0, 0, 0]], []], "two clusters"),
    "leaf reaches out of its cluster": ([[_VEC], [0], [[16, 0, 0, 4]], []], "reaches"),
    "leaf at an odd byte": ([[_VEC], [0], [[24, 0, 0, 2]], []], "byte 2"),
    "empty leaf in a cluster": ([[[0, 0, [0], None]], [0], [[16, 0, 0, 0]], []], "no memory"),
    "bytes in a cluster": ([[[-1, 0, [16], None]], [0], [[16, 0, 0, 0]], []], "no memory"),
    "self-overlap in a scattered cluster": ([[[0, 0, [3, 2], [4, 4]]], [0], [[64, 1, 0, 0]], []], "overlaps itself"),
    "wrong dtype of numpy": ([[["<q9", 0, [2], None]], [0], [], []], "wrongly"),
    "objects of numpy": ([[["|O", 0, [2], None]], [0], [], []], "wrongly"),
    "a long list as dtype": ([[["<f4, <f4", 0, [2], None]], [0], [], []], "wrongly"),
    "field beyond its item": ([[[[8, 0, [["a", None, 4, "<d"]]], 0, [2], None]], [0], [], []], "wrongly"),
    "field before its item": ([[[[16, 0, [["a", None, -4, "<d"]]], 0, [2], None]], [0], [], []], "wrongly"),
    "field without a name": ([[[[16, 0, [[7, None, 0, "<d"]]], 0, [1], None]], [0], [], []], "wrongly"),
    "nested too deep": ([[[[[[[["<d", [1]], [1]], [1]], [1]], 0, [2], None]] * 1, [0], [], []], "."),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_table_is_refused_before_anything_is_allocated(name: str) -> None:
    table, text = MALFORMED[name]
    with pytest.raises(DecodeError, match=text):
        MemoryReader(table, inline_bytes=16, segments=[], max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("owners", "sizes", "text"),
    [
        ([0, 0], [16, 16], "two places"),
        ([7], [16], "does not exist"),
        ([-1], [16], "does not exist"),
        (["0"], [16], "no buffer"),
        ([True], [16], "no buffer"),
        ([[0, "1"]], [16], "no buffer"),
        ([[0, 0]], [32], "two places"),
        ([0, 1], [16, 8], "contents"),
        ([[0, 1]], [16], "contents"),
        ([0], [16], "inline area"),
    ],
)
def test_segments_that_do_not_fit_are_refused(owners: Any, sizes: list[int], text: str) -> None:
    table = [[_VEC], [0, 0], [], owners]
    with pytest.raises(DecodeError, match=text):
        MemoryReader(table, inline_bytes=0, segments=[(size, False) for size in sizes], max_bytes=1 << 20)


def test_more_memory_than_allowed_is_refused() -> None:
    with pytest.raises(LimitError, match="max_bytes is 1048576"):
        MemoryReader([[_VEC], [0], [[1 << 40, 1, 0, 0]], []], inline_bytes=16, segments=[], max_bytes=1 << 20)
    with pytest.raises(LimitError):
        MemoryReader([[], [], [], []], inline_bytes=1 << 21, segments=[], max_bytes=1 << 20)


_BAD: list[Any] = [
    *(-1, 0, 1, 2, 3, 5, 8, 16, 63, 255, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63)),
    *(None, True, 1.5, "x", b"x", [], [1], [[]], {}, "<d", "|S5", [8, 0, [["a", None, 0, "<d"]]]),
]


def _paths(node: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    below = [each for index, child in enumerate(node) for each in _paths(child, (*path, index))] if type(node) is list else []
    return [path, *below]


def _mutated(rng: random.Random, table: Any) -> Any:
    table = copy.deepcopy(table)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        path = rng.choice(_paths(table))
        if not path:
            return rng.choice(_BAD)
        node = table
        for index in path[:-1]:
            node = node[index]
        what = rng.randrange(4)
        if what == 0:
            del node[path[-1]]
        elif what == 1:
            node.insert(path[-1], copy.deepcopy(rng.choice(_BAD)))
        elif what == 2 and type(node[path[-1]]) is int:
            node[path[-1]] += rng.choice([-8, -1, 1, 8])
        else:
            node[path[-1]] = copy.deepcopy(rng.choice(_BAD))
    return table


def test_mutated_tables_are_refused_or_describe_what_is_there() -> None:
    accepted = 0
    for seed in range(150):
        rng = random.Random(seed)
        objs = [*_some_views(rng), b"abc"]
        memory, inline = take_apart(objs, rng.choice([1, 64, 1 << 19]))
        for _ in range(20):
            try:
                reader = reader_of(memory, _mutated(rng, memory.table), max_bytes=1 << 20)
            except (DecodeError, LimitError):
                continue
            accepted += 1
            for leaf in reader.build(inline.clone(), [segment.clone() for segment in memory.segments]):
                if isinstance(leaf, torch.Tensor) and leaf.numel():
                    storage = leaf.untyped_storage()
                    end = storage.data_ptr() + storage.nbytes()
                    assert storage.data_ptr() <= leaf.data_ptr()
                    extents = zip(leaf.shape, leaf.stride(), strict=True)
                    reach = sum((extent - 1) * stride for extent, stride in extents) + 1
                    assert leaf.data_ptr() + reach * leaf.element_size() <= end
    assert accepted > 50


# -- accelerators ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as one of an accelerator, though its memory is the CPU's."""
    monkeypatch.setattr(tensors, "on_accelerator", lambda device: True)


@pytest.mark.usefixtures("accelerator")
def test_small_accelerator_tensors_are_gathered_into_one_segment() -> None:
    x = torch.randn(100)
    objs = [torch.ones(3), torch.ones(5, dtype=torch.bool), x, x[3:], torch.randn(4, 4).t(), torch.empty(0), *torch.ones(9, 3)]
    large = torch.randn(1 << 18)
    memory, inline = take_apart([*objs, large])
    assert inline.numel() == 0
    assert len(memory.segments) == 2
    received = reader_of(memory).build(inline, memory.segments)
    assert_same_memory([*objs, large], received)
    assert received[-1].data_ptr() == large.data_ptr()
    for each in received[:2]:
        assert each.untyped_storage().nbytes() == each.numel() * each.element_size()


def test_device_moves_every_tensor_and_keeps_what_is_shared() -> None:
    x = torch.randn(100)
    y = torch.randn(1 << 18)
    objs = [torch.ones(3), x, x[3:], y, y[5:], torch.empty(3, 0), np.ones(3), b"abc", torch.ones(2000)]
    received = through(objs, device=torch.device("meta"))
    for one, other in zip(objs, received, strict=True):
        assert type(other) is (memoryview if isinstance(one, bytes) else type(one))
        if isinstance(one, torch.Tensor):
            assert other.is_meta and other.shape == one.shape and other.stride() == one.stride()
    storages = [each.untyped_storage()._cdata if isinstance(each, torch.Tensor) else None for each in received]
    assert storages[1] == storages[2] and storages[3] == storages[4]
    assert len({storages[number] for number in (0, 1, 3, 8)}) == 4
    assert np.array_equal(received[6], np.ones(3))


def test_an_empty_tensor_of_an_accelerator_finds_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "on_accelerator", lambda device: True)
    memory, inline = take_apart([torch.empty(0, 3)])
    monkeypatch.undo()
    monkeypatch.setattr(tensors, "current_accelerator", lambda: torch.device("meta"))
    (received,) = reader_of(memory).build(inline, [])
    assert received.is_meta and received.shape == (0, 3)


def test_where_an_accelerator_tensor_goes_without_an_accelerator() -> None:
    if not torch.cuda.is_available():
        assert tensors.current_accelerator() == torch.device("cpu")


def test_places_counts_every_byte() -> None:
    x = torch.arange(4, dtype=torch.int16)[::2]
    first = x.data_ptr()
    assert places(x) == [first, first + 1, first + 4, first + 5]
