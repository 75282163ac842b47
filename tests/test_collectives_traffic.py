"""How many messages and bytes calls among several ranks take, and who has which memory."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm.wire.frame import CHUNK_BYTES
from tests.ranks import run_ranks

MIB = 1 << 20


def traffic(call: Callable[[], Any]) -> dict[str, int]:
    call()
    dist.barrier()
    before = objcomm.stats()
    call()
    after = objcomm.stats()
    dist.barrier()
    return {name: after[name] - before[name] for name in after}


def test_a_broadcast_takes_one_message_each_way_for_every_rank_but_one() -> None:
    def ranks(rank: int) -> dict[str, int]:
        return traffic(lambda: objcomm.broadcast_object({"a": 1} if rank == 0 else None, 0))

    for world in (2, 4, 5):
        counted = run_ranks(ranks, world)
        assert [one["messages_sent"] for one in counted] == [world - 1, *[1] * (world - 1)]
        assert [one["messages_received"] for one in counted] == [world - 1, *[1] * (world - 1)]
        assert [one["objects_received"] for one in counted] == [0, *[1] * (world - 1)]
        assert [one["objects_sent"] for one in counted] == [world - 1, *[0] * (world - 1)]
        # A frame of the head, the call's name and a few bytes of what is in it.
        assert counted[1]["bytes_sent"] < 110
        assert counted[1]["bytes_received"] < 130


def test_a_broadcast_to_many_ranks_is_a_tree() -> None:
    def ranks(rank: int) -> dict[str, int]:
        obj = {"t": torch.ones(3 * CHUNK_BYTES, dtype=torch.uint8), "n": 1} if rank == 2 else None
        return traffic(lambda: objcomm.broadcast_object(obj, 2))

    counted = run_ranks(ranks, 8, timeout=120)
    # From rank 2: 3, 4, 5 and 6; from rank 3: 7, 0 and 1. Each gets a head and three chunks, after a word from it.
    sent = {2: 4 * 4, 3: 3 * 4 + 1}
    assert [one["messages_sent"] for one in counted] == [sent.get(rank, 1) for rank in range(8)]
    received = {2: 4, 3: 4 + 3}
    assert [one["messages_received"] for one in counted] == [received.get(rank, 4) for rank in range(8)]
    payload = 3 * CHUNK_BYTES
    assert 4 * payload < counted[2]["bytes_sent"] < 4 * (payload + 400)
    assert 3 * payload < counted[3]["bytes_sent"] < 3 * (payload + 400)
    assert payload < counted[1]["bytes_received"] < payload + 400


def test_a_rank_in_the_middle_of_a_tree_encodes_nothing() -> None:
    def ranks(rank: int) -> None:
        outgoing: Any = importlib.import_module("objcomm.outgoing")

        calls: list[object] = []
        original = outgoing.encode

        def counting(obj: object, **more: Any) -> Any:
            calls.append(obj)
            return original(obj, **more)

        outgoing.encode = counting
        obj = [torch.ones(MIB), "x" * 100_000] if rank == 0 else None
        arrived: Any = objcomm.broadcast_object(obj, 0)
        assert torch.equal(arrived[0], torch.ones(MIB))
        assert len(calls) == (1 if rank == 0 else 0)
        objcomm.all_gather_objects(rank)
        objcomm.all_gather_objects(torch.ones(MIB))
        assert len(calls) == (3 if rank == 0 else 2)

    run_ranks(ranks, 6)


def test_scatter_gather_and_all_to_all_take_exact_sizes() -> None:
    def ranks(rank: int) -> list[dict[str, int]]:
        mine = torch.ones((rank + 1) * MIB, dtype=torch.uint8)
        all_of_them = [torch.ones((to + 1) * MIB, dtype=torch.uint8) for to in range(4)]
        return [
            traffic(lambda: objcomm.scatter_objects(all_of_them if rank == 0 else None, 0)),
            traffic(lambda: objcomm.gather_objects(mine, 0)),
            traffic(lambda: objcomm.all_to_all_objects(all_of_them)),
            traffic(lambda: objcomm.all_gather_objects(mine)),
        ]

    scattered, gathered, exchanged, spread = zip(*run_ranks(ranks, 4), strict=True)
    # A head and a segment for each, and a word from everybody.
    assert [one["messages_sent"] for one in scattered] == [6, 1, 1, 1]
    assert [one["bytes_received"] // MIB for one in scattered] == [0, 2, 3, 4]
    assert 9 * MIB < scattered[0]["bytes_sent"] < 9 * MIB + 1000
    # A head and a segment from each, and the verdict.
    assert [one["messages_sent"] for one in gathered] == [3, 2, 2, 2]
    assert [one["bytes_sent"] // MIB for one in gathered] == [0, 2, 3, 4]
    assert 9 * MIB < gathered[0]["bytes_received"] < 9 * MIB + 1000
    assert [one["messages_sent"] for one in exchanged] == [6, 6, 6, 6]
    assert [one["bytes_received"] // MIB for one in exchanged] == [3 * (rank + 1) for rank in range(4)]
    # That each has a large object is known to all after a word to the root and one back; then each goes its own way.
    assert [one["messages_sent"] for one in spread] == [3 + 6, 1 + 6, 1 + 6, 1 + 6]
    assert [one["bytes_sent"] // MIB for one in spread] == [3 * (rank + 1) for rank in range(4)]
    assert [one["bytes_received"] // MIB for one in spread] == [10 - (rank + 1) for rank in range(4)]


def test_an_all_gather_of_small_objects_takes_two_messages_for_every_rank_but_one() -> None:
    def ranks(rank: int) -> dict[str, int]:
        return traffic(lambda: objcomm.all_gather_objects({"rank": rank, "t": torch.ones(200)}))

    for world in (4, 7):
        counted = run_ranks(ranks, world)
        assert sum(one["messages_sent"] for one in counted) == 2 * (world - 1)
        assert [one["objects_received"] for one in counted] == [world - 1] * world
        assert sum(one["bytes_received"] for one in counted) == sum(one["bytes_sent"] for one in counted)


def test_the_strict_backend_takes_as_many_messages() -> None:
    def ranks(rank: int) -> list[int]:
        small = traffic(lambda: objcomm.all_gather_objects(rank))["messages_sent"]
        return [small, traffic(lambda: objcomm.broadcast_object(rank, 1))["messages_sent"]]

    assert run_ranks(ranks, 4, backend="strict") == [[3, 1], [1, 3], [1, 1], [1, 1]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_only_gives_allocates_nothing_for_the_others() -> None:
    def ranks(rank: int) -> None:
        from objcomm.cli.bench_memory import peak_beyond

        mine = torch.ones(40 * MIB, dtype=torch.uint8)
        objcomm.gather_objects("warm", 0)
        dist.barrier()
        rise, _ = peak_beyond(lambda: objcomm.gather_objects(mine, 0))
        assert rise < 8 * MIB if rank else rise >= 2 * 40 * MIB

    run_ranks(ranks, 3)


def test_a_late_object_does_not_keep_the_others_waiting() -> None:
    def ranks(rank: int) -> None:
        objcomm.all_gather_objects(rank)
        if rank == 1:
            time.sleep(1.0)
        began = time.monotonic()
        objcomm.all_to_all_objects([rank] * 4)
        assert (time.monotonic() - began < 0.9) == (rank == 1)

    run_ranks(ranks, 4)
