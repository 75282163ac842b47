"""A memory table from anywhere: every number in it is checked before anything is allocated."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from objcomm.codec.memory import MemoryReader
from objcomm.errors import DecodeError, LimitError
from tests.memory_loop import reader_of, some_views, take_apart

_VEC = [0, 0, [4], None]


def _nested(depth: int) -> Any:
    return [_nested(depth - 1), [1]] if depth else "<d"


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
    "nested too deep": ([[[_nested(40), 0, [2], None]], [0], [], []], "nested too deeply"),
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
    children = enumerate(node) if type(node) is list else ()
    return [path, *(each for index, child in children for each in _paths(child, (*path, index)))]


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
        objs = [*some_views(rng), b"abc"]
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
