"""Which rank a call means, and every way to get that wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from objcomm.errors import UsageError
from objcomm.transport import hugepages, rank_in, resolve
from tests.ranks import run_ranks


def text_of(*args: Any) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(*args)
    return str(caught.value)


def test_wrong_calls() -> None:
    def rank_main(rank: int) -> None:
        group = dist.new_group([0, 2])
        assert "neither is given" in text_of(None, None, None, "dst")
        assert "both are given" in text_of(None, 1, 1, "dst")
        assert "exactly one of dst and group_dst" in text_of(None, 1, 1, "dst")
        assert f"src={rank} is this rank itself" in text_of(None, rank, None, "src")
        assert f"group_src={rank} is this rank itself" in text_of(None, None, rank, "src")
        assert "src=7 is not in the group, whose global ranks are [0, 1, 2]" in text_of(None, 7, None, "src")
        assert "src=-1 is not in the group" in text_of(None, -1, None, "src")
        assert "group_dst=-1 is no rank of a group of 3" in text_of(None, None, -1, "dst")
        assert "group_dst=3 is no rank of a group of 3" in text_of(None, None, 3, "dst")
        assert "dst must be a rank, an int, not str" in text_of(None, "1", None, "dst")
        assert "dst must be a rank, an int, not bool" in text_of(None, True, None, "dst")
        assert "group must be a process group, not str" in text_of("world", 1, None, "dst")
        if rank == 1:
            for call in (lambda: resolve(group, 0, None, "dst"), lambda: rank_in(group)):
                with pytest.raises(UsageError, match=r"this rank is not in the group.*rank 1"):
                    call()
        else:
            assert resolve(group, 2 - rank, None, "dst") == (group, 2 - rank, (2 - rank) // 2)
            assert "dst=1 is not in the group, whose global ranks are [0, 2]" in text_of(group, 1, None, "dst")
            assert rank_in(group) == rank
        assert rank_in(None) == rank
        dist.barrier()
        if rank != 1:
            dist.destroy_process_group(group)
            assert "has been destroyed" in text_of(group, 2 - rank, None, "dst")
        world = dist.group.WORLD
        dist.destroy_process_group()
        assert "there is no process group" in text_of(None, 1, None, "dst")
        assert "there is no process group" in text_of(world, 1, None, "dst")
        with pytest.raises(UsageError, match="init_process_group"):
            rank_in(None)

    run_ranks(rank_main, 3)


def test_a_peer_is_found_quickly() -> None:
    def rank_main(rank: int) -> float:
        resolve(None, 1 - rank, None, "dst")
        best = float("inf")
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(200):
                resolve(None, 1 - rank, None, "dst")
            best = min(best, (time.perf_counter() - began) / 200)
        return best

    assert min(run_ranks(rank_main)) < 5e-6


@pytest.mark.parametrize("nbytes", [0, 1, hugepages.HUGE_BYTES - 1, hugepages.HUGE_BYTES, (5 << 20) + 123])
def test_memory_on_huge_pages_is_ordinary_memory(nbytes: int) -> None:
    memory = hugepages.empty(nbytes)
    memory.fill_(7)
    assert memory.numel() == nbytes
    assert memory.sum() == 7 * nbytes
