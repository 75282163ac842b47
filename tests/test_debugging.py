"""Debug mode: calls among several ranks that do not match are told on all ranks before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

import objcomm
from tests.ranks import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "strict"])


@BACKENDS
def test_calls_that_match_go_through(backend: str) -> None:
    def body(rank: int) -> list[Any]:
        objcomm.debug()
        got = [objcomm.broadcast_object(step if rank == 0 else -1, src=0) for step in range(5)]
        if rank < 2:
            got.append(objcomm.broadcast_object(rank, src=1, ranks=[0, 1]))
        objcomm.debug(False)
        return [*got, objcomm.broadcast_object(9 if rank == 0 else None, src=0)]

    found = run_ranks(body, 3, backend=backend)
    assert found == [[0, 1, 2, 3, 4, 1, 9], [0, 1, 2, 3, 4, 1, 9], [0, 1, 2, 3, 4, 9]]


@BACKENDS
def test_another_source_is_told_on_all_ranks_and_the_next_call_works(backend: str) -> None:
    def body(rank: int) -> Any:
        objcomm.debug()
        with pytest.raises(objcomm.ProtocolError) as caught:
            objcomm.broadcast_object("x", src=0 if rank < 2 else 1, channel="config")
        return str(caught.value), objcomm.broadcast_object("right" if rank == 0 else "", src=0)

    for text, after in run_ranks(body, 3, backend=backend):
        for rank, src in ((0, 0), (1, 0), (2, 1)):
            assert f"rank {rank}: broadcast_object(src={src}, channel='config') at " in text
        assert text.count(" in body") == 3
        assert after == "right"


def test_another_line_is_a_difference_unless_lines_do_not_count() -> None:
    def body(rank: int) -> str:
        def call() -> Any:
            if rank == 0:
                return objcomm.broadcast_object("sent", src=0)
            return objcomm.broadcast_object(None, src=0)

        objcomm.debug()
        with pytest.raises(objcomm.ProtocolError, match="do not make the same call"):
            call()
        objcomm.debug(lines=False)
        return str(call())

    assert run_ranks(body, 2) == ["sent", "sent"]


def test_a_rank_that_skips_a_call_is_named_with_the_lines_of_the_others() -> None:
    def body(rank: int) -> str:
        objcomm.debug()
        objcomm.broadcast_object(0, src=0)
        if rank == 1:
            return ""
        with pytest.raises(objcomm.TransferTimeout) as caught:
            objcomm.broadcast_object(1, src=0, timeout=3.0)
        return str(caught.value)

    texts = run_ranks(body, 3)
    for rank in (0, 2):
        assert "rank 1 did not come to call number 1 among these ranks" in texts[rank]
        assert "rank 1: has not come" in texts[rank]
        assert "rank 0: broadcast_object(src=0, channel='') at" in texts[rank]
        assert "rank 2: broadcast_object(src=0, channel='') at" in texts[rank]
        assert "rank 1 last said" in texts[rank]


def test_the_environment_asks_for_it() -> None:
    def body(rank: int) -> None:
        with pytest.raises(objcomm.ProtocolError):
            objcomm.broadcast_object(0, src=rank)

    run_ranks(body, 2, env={"OBJCOMM_DEBUG": "1"})
