"""The memory table: what travels of overlapping leaves, and that a table is checked before anything is allocated."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from objcomm.codec import columns, tensors
from objcomm.errors import DecodeError, EncodeError
from tests.memory_loop import (
    assert_same_memory,
    bytes_sent,
    places,
    reader_of,
    some_views,
    take_apart,
    through,
)


def _grid(rows: int = 64, columns: int = 48) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


# -- what travels ----------------------------------------------------------------------------------------------------


def _randn(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def _arange(count: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.arange(count)


def _record() -> np.ndarray[Any, Any]:
    return np.zeros(9, dtype=[("a", "i1"), ("b", "<f8")])


# What the views are of, the views, and the bytes that travel.
COUNTED: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Any]], int]] = {
    "a part of a large storage": (_randn(1 << 16), lambda x: [x[100:110]], 40),
    "a column": (_grid, lambda x: [x[:, 5]], 64 * 4),
    "every third": (_arange(99), lambda x: [x[::3]], 33 * 8),
    "transposed": (_grid, lambda x: [x.t()], 64 * 48 * 4),
    "channels last": (_randn(2, 3, 4, 5), lambda x: [x.to(memory_format=torch.channels_last)], 480),
    "expanded": (_randn(3, 1), lambda x: [x.expand(3, 1000)], 12),
    "an expanded column": (_grid, lambda x: [x[:, :1].expand(64, 1000)], 64 * 4),
    "sliding windows": (_arange(100), lambda x: [x.unfold(0, 10, 1)], 800),
    "an element": (_grid, lambda x: [x[3, 4]], 4),
    "thirds of the last dimension": (_grid, lambda x: [*x.chunk(3, -1)], 64 * 48 * 4),
    "two thirds": (_grid, lambda x: [*x.chunk(3, -1)[1:]], 64 * 32 * 4),
    "first and last column": (_grid, lambda x: [x[:, 0], x[:, -1]], 2 * 64 * 4),
    "two channels": (_randn(100, 100, 40), lambda x: [x[..., 0], x[..., 2]], 80_000),
    "even and odd": (_arange(100), lambda x: [x[::2], x[1::2]], 800),
    "steps of four and twelve": (_arange(120), lambda x: [x[::4], x[2::12]], (30 + 10) * 8),
    "steps of four and ten": (_arange(120), lambda x: [x[::4], x[1::10]], (30 + 12) * 8),
    "steps of four and ten that meet": (_arange(120), lambda x: [x[::4], x[::10]], (30 + 12) * 8),
    "a column twice": (_grid, lambda x: [x[:, 0], x[:, 0]], 64 * 4),
    "a column and its end": (_grid, lambda x: [x[:, 0], x[9:, 0]], 64 * 4),
    "columns that overlap": (_grid, lambda x: [x[:, 0:3], x[2:, 1:4]], 64 * 4 * 4),
    "a part twice": (_arange(1000), lambda x: [x[:9], x[:9], x[3:9]], 72),
    "halves": (_arange(10), lambda x: [x[:5], x[5:]], 80),
    "overlapping halves": (_arange(10), lambda x: [x[:6], x[4:]], 80),
    "as integers": (_randn(10), lambda x: [x, x.view(torch.int32)], 40),
    "complex": (_randn(10, 2), lambda x: [x, torch.view_as_complex(x), x[:, 0], x[:, 1]], 80),
    "a diagonal and a row": (_randn(40, 40), lambda x: [x.diagonal(), x[0]], 2 * 160),
    "tensors and arrays": (_grid, lambda x: [x, x.numpy(), x[3:], x.numpy()[::-1]], 64 * 48 * 4),
    "flipped": (lambda: np.arange(100), lambda x: [x[::-1]], 800),
    "flipped with gaps": (lambda: np.arange(100), lambda x: [x[::-2]], 400),
    "broadcast": (lambda: np.arange(3.0), lambda x: [np.broadcast_to(x, (1000, 3))], 24),
    "a field": (_record, lambda x: [x["b"]], 72),
    "both fields": (_record, lambda x: [x["a"], x["b"]], 81),
    "nothing": (lambda: None, lambda x: [torch.empty(0), torch.empty(3, 0, 5), np.empty((0, 4))], 0),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("threshold", [1, 100, 1 << 19])
def test_only_what_is_shown_travels_and_sharing_stays(name: str, threshold: int) -> None:
    base, views, expected = COUNTED[name]
    objs = views(base())
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


def test_random_views_keep_their_values_and_share_exactly_what_they_shared() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        objs = some_views(rng)
        assert_same_memory(objs, through(objs, rng.choice([1, 32, 512, 1 << 19])))


def test_views_of_one_buffer_through_several_storages() -> None:
    buffer = bytearray(range(200))
    one = torch.frombuffer(buffer, dtype=torch.uint8, count=100)
    other = torch.frombuffer(buffer, dtype=torch.float32, count=20, offset=40)
    assert_same_memory([one, other], through([one, other]))
    odd = torch.frombuffer(buffer, dtype=torch.int16, count=20, offset=1)
    assert_same_memory([odd], through([odd]))
    assert_same_memory([one[3:], other, one[1::2]], through([one[3:], other, one[1::2]]))


def test_overlapping_views_that_cannot_all_be_aligned_are_refused() -> None:
    buffer = bytearray(200)
    even = torch.frombuffer(buffer, dtype=torch.int32, count=20)
    odd = torch.frombuffer(buffer, dtype=torch.int32, count=20, offset=1)
    with pytest.raises(EncodeError, match="aligned"):
        take_apart([even, odd])


# -- raw bytes -------------------------------------------------------------------------------------------------------


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


# -- the areas that arrive -------------------------------------------------------------------------------------------


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


# -- accelerators ----------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as one of an accelerator, though its memory is the CPU's."""
    monkeypatch.setattr(tensors, "on_accelerator", lambda device: True)
    monkeypatch.setattr(columns, "_cpu_keys", set())


@pytest.mark.usefixtures("accelerator")
def test_small_accelerator_tensors_are_gathered_into_one_segment() -> None:
    x = torch.randn(100)
    objs = [torch.ones(3), torch.ones(5, dtype=torch.bool), x, x[3:], torch.randn(4, 4).t(), torch.empty(0)]
    objs += torch.ones(9, 3).unbind()
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
    objs: list[Any] = [torch.ones(3), x, x[3:], y, y[5:], torch.empty(3, 0), np.ones(3), b"abc", torch.ones(2000)]
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
    monkeypatch.setattr(columns, "_cpu_keys", set())
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
