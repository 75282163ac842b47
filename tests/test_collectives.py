"""Objects among several ranks at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.ranks import run_ranks
from tests.same import assert_arrived
from tests.values import VALUES


def test_broadcast_of_every_value(backend: str) -> None:
    def ranks(rank: int) -> None:
        for i, (name, make) in enumerate(VALUES):
            torch.manual_seed(11)
            src = i % 3
            value = make()
            got = objcomm.broadcast_object(value if rank == src else (), src, channel=name)
            if rank == src:
                assert got is value
            else:
                assert_arrived(got, value)

    run_ranks(ranks, 3, backend=backend, timeout=120)


def test_broadcast_among_named_ranks_and_in_a_group(backend: str) -> None:
    def ranks(rank: int) -> None:
        obj = {"big": torch.arange(300_000), "n": None}
        before = objcomm.stats()
        if rank != 1:
            assert_arrived(objcomm.broadcast_object(obj if rank == 2 else None, 2, ranks=[0, 2, 3]), obj)
        else:
            with pytest.raises(objcomm.UsageError, match="this rank, 1, is not among the ranks"):
                objcomm.broadcast_object(None, 2, ranks=[0, 2, 3])
        with pytest.raises(objcomm.UsageError, match="2, is not among"):
            objcomm.broadcast_object(None, 2, ranks=[0, 1, 3])
        after = objcomm.stats()
        sent = 2 * 2 if rank == 2 else 0
        received = 2 if rank in (0, 3) else 0
        assert after["messages_sent"] - before["messages_sent"] == sent
        assert after["messages_received"] - before["messages_received"] == received
        assert objcomm.broadcast_object(rank, rank, ranks=[rank]) == rank

        group = dist.new_group([1, 3])
        if rank in (1, 3):
            work: Any = objcomm.broadcast_object("x" if rank == 3 else (), 3, group=group, async_op=True, channel="c")
            assert work.wait() == "x"

    run_ranks(ranks, 4, backend=backend)


def test_a_broadcast_that_cannot_be_encoded_fails_on_every_rank_and_the_next_works(backend: str) -> None:
    def ranks(rank: int) -> None:
        bad = {"a": [threading.Lock()]} if rank == 1 else None
        with pytest.raises(objcomm.EncodeError if rank == 1 else objcomm.PeerError) as caught:
            objcomm.broadcast_object(bad, 1)
        assert caught.value.path == "obj['a'][0]"
        assert objcomm.broadcast_object(rank, 1) == 1

    run_ranks(ranks, 3, backend=backend)
