"""Memory that is received into is used again only when nothing can see it any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import objcomm
from objcomm.transport import pool
from objcomm.transport.pool import Pool
from tests.ranks import run_ranks

MIB = 1 << 20


def typed(memory: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(memory.untyped_storage(), 4, (100,), (1,))


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda memory: memory,
    "a view": lambda memory: memory[5:9],
    "another tensor over the storage": typed,
    "a parameter": lambda memory: torch.nn.Parameter(typed(memory)),
    "a detached tensor": lambda memory: typed(memory).detach(),
    "the storage": lambda memory: memory.untyped_storage(),
    "a typed storage": lambda memory: typed(memory).storage().untyped(),
    "a part of the storage": lambda memory: memory.untyped_storage()[8:72],
    "a weak reference to the storage": lambda memory: weakref.ref(memory.untyped_storage()),
    "an array": lambda memory: memory.numpy(),
    "a view of an array": lambda memory: memory.numpy()[::2],
    "a memoryview of an array": lambda memory: memory.numpy().data,
    "dlpack": lambda memory: memory.__dlpack__(),
    "a graph": lambda memory: (typed(memory).zero_() * torch.ones(100, requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_somebody_holds_is_not_used_again(holder: str) -> None:
    blocks = Pool()
    memory = blocks.take(MIB, 4 * MIB)
    address = memory.data_ptr()
    held = [HOLDERS[holder](memory)]
    del memory
    gc.collect()
    other = blocks.take(MIB, 4 * MIB)
    assert other.data_ptr() != address
    held.clear()
    gc.collect()
    assert blocks.take(MIB, 4 * MIB).data_ptr() == address


def test_memory_that_its_user_exchanged_is_forgotten() -> None:
    for exchange in (lambda memory: memory.resize_(3 * MIB), lambda memory: memory.share_memory_()):
        blocks = Pool()
        memory = blocks.take(MIB, 4 * MIB)
        exchange(memory)
        before = memory.data_ptr()
        del memory
        again = blocks.take(MIB, 4 * MIB)
        assert again.untyped_storage().nbytes() == MIB
        assert again.data_ptr() != before
        assert not again.is_shared()


def test_sizes_that_differ_a_little_share_a_block_and_others_do_not() -> None:
    blocks = Pool()
    address = blocks.take(MIB, 8 * MIB).data_ptr()
    smaller = blocks.take(MIB - 1000, 8 * MIB)
    assert smaller.data_ptr() == address
    assert smaller.numel() == MIB - 1000
    del smaller
    assert blocks.take(MIB // 2, 8 * MIB).data_ptr() != address


def test_no_more_is_known_than_asked_for_and_little_lies_idle() -> None:
    blocks = Pool()
    held = [blocks.take(MIB, 4 * MIB) for _ in range(9)]
    assert sum(block.nbytes for block in blocks._blocks) <= 4 * MIB
    held.clear()
    for mebibytes in (40, 20, 50):
        blocks.take(mebibytes * MIB, 60 * MIB)
        idle = [block.nbytes for block in blocks._blocks if block.idle]
        assert sum(idle) - mebibytes * MIB <= 8 * MIB
    blocks.take(MIB, 0)
    assert blocks._blocks == []


def test_without_a_count_of_holders_nothing_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_use_count", None)
    blocks = Pool()
    first = blocks.take(MIB, 4 * MIB)
    assert first.numel() == MIB
    assert blocks._blocks == []


def _train(rank: int) -> list[int]:
    """Objects that are kept keep their values, whatever comes later; what is dropped is received into again."""
    addresses = []
    kept: list[Any] = []
    for step in range(12):
        value = {
            "x": torch.full((MIB,), float(step)),
            "parts": [torch.full((3 * 4096,), step, dtype=torch.int16) for _ in range(20)],
            "array": np.full(MIB, step, dtype=np.int16),
        }
        if rank == 0:
            objcomm.send_object(value, 1)
            continue
        got = objcomm.recv_object(0)
        addresses.append(got["x"].data_ptr())
        if step % 3 == 0:
            kept.append((step, got["x"][7:9], got["parts"][3], got["array"][::5]))
        elif step == 7:
            kept.append((step, got["x"].numpy(), got["parts"], memoryview(got["array"])[3:4]))
    for step, *parts in kept:
        for part in parts:
            flat = part[0] if isinstance(part, list) else part
            assert set(np.asarray(flat).ravel().tolist()) == {step}
    return addresses


def test_kept_objects_stay_as_they_are_while_dropped_ones_make_room() -> None:
    addresses = run_ranks(_train, 2)[1]
    assert len(set(addresses)) < len(addresses)
