"""Debug mode: calls among several ranks that do not match are told on all ranks before anything is sent."""

from __future__ import annotations

import re
import threading
import time
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


def _call(name: str, channel: str = "", **more: Any) -> Any:
    """The call that all ranks make, on one line."""
    several: list[list[Any]] = [[], []]
    given: dict[str, tuple[Any, ...]] = {
        "broadcast_object": (1, 0),
        "scatter_objects": (several, 0),
        "gather_objects": (1, 0),
        "all_gather_objects": (1,),
        "all_to_all_objects": (several,),
    }
    return getattr(objcomm, name)(*given[name], channel=channel, **more)


CALLS = ["broadcast_object", "scatter_objects", "gather_objects", "all_gather_objects", "all_to_all_objects"]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_among_several_ranks_is_compared(name: str) -> None:
    def body(rank: int) -> list[str]:
        objcomm.debug()
        told = []
        with pytest.raises(objcomm.ProtocolError) as caught:
            _call(name if rank == 0 else CALLS[CALLS.index(name) - 1])
        told.append(str(caught.value))
        with pytest.raises(objcomm.ProtocolError) as caught:
            _call(name, channel=f"of rank {rank}")
        told.append(str(caught.value))
        if name != "gather_objects":
            with pytest.raises(objcomm.ProtocolError, match="async_op=True"):
                _call(name, async_op=rank == 0)
        assert caught.value.rank == rank
        _call(name)
        return told

    for calls, channels in run_ranks(body, 2):
        other = CALLS[CALLS.index(name) - 1]
        assert f"\n  rank 0: {name}(" in calls
        assert f"\n  rank 1: {other}(" in calls
        assert "OBJCOMM_DEBUG=calls" not in calls
        assert "channel='of rank 0') at " in channels
        assert "channel='of rank 1') at " in channels


def test_lines_of_one_call_in_two_branches_say_how_to_leave_lines_out() -> None:
    def body(rank: int) -> str:
        with pytest.raises(objcomm.ProtocolError) as caught:
            if rank == 0:
                objcomm.gather_objects(1, dst=0)
            else:
                objcomm.gather_objects(1, dst=0)
        return str(caught.value)

    for text in run_ranks(body, 2, env={"OBJCOMM_DEBUG": "1"}):
        assert text.endswith("use objcomm.debug(lines=False) or OBJCOMM_DEBUG=calls")


def test_the_environment_asks_for_calls_without_lines() -> None:
    def body(rank: int) -> Any:
        obj: Any = "sent" if rank == 0 else None
        # On lines of their own, which are not compared.
        if rank == 0:
            assert objcomm.broadcast_object(obj, src=0) == "sent"
        else:
            assert objcomm.broadcast_object(obj, src=0) == "sent"
        with pytest.raises(objcomm.ProtocolError) as caught:
            objcomm.broadcast_object(None, src=rank)
        return str(caught.value)

    for text in run_ranks(body, 2, env={"OBJCOMM_DEBUG": "calls"}):
        assert "rank 1: broadcast_object(src=1, channel='') at " in text


def test_the_calls_that_stand_in_for_torchs_are_compared_and_show_the_programs_line() -> None:
    def body(rank: int) -> str:
        import torch.distributed as dist

        import objcomm.torch_compat

        objcomm.torch_compat.install()
        objcomm.debug()
        box = ["config" if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        assert box == ["config"]
        found = [None, None]
        dist.all_gather_object(found, rank)
        assert found == [0, 1]
        with pytest.raises(objcomm.ProtocolError) as caught:
            if rank == 0:
                dist.broadcast_object_list(box, src=0)
            else:
                dist.gather_object(rank, None, dst=0)
        return str(caught.value)

    for text in run_ranks(body, 2):
        assert re.search(r"rank 0: broadcast_object\(src=0, channel='torch.distributed'\) at .* in body", text)
        assert re.search(r"rank 1: gather_objects\(dst=0, channel='torch.distributed'\) at .* in body", text)


def test_ranks_are_the_same_in_any_order() -> None:
    def body(rank: int) -> list[Any]:
        objcomm.debug()
        order = [0, 1] if rank == 0 else [1, 0]
        first = objcomm.all_gather_objects(rank, ranks=[0, 1])
        return [first, objcomm.broadcast_object(rank, src=0, ranks=order), objcomm.all_gather_objects(rank)]

    assert run_ranks(body, 2) == [[[0, 1], 0, [0, 1]]] * 2


def test_a_rank_that_waits_for_the_others_calls_says_so() -> None:
    def body(rank: int) -> str:
        objcomm.debug()
        if rank == 1:
            time.sleep(1.0)
            with pytest.raises(objcomm.ProtocolError):
                objcomm.broadcast_object("late", src=1)
            return ""
        told: list[str] = []
        thread = threading.Timer(0.5, lambda: told.append(objcomm.report()))
        thread.start()
        with pytest.raises(objcomm.ProtocolError):
            objcomm.gather_objects(1, dst=1)
        thread.join()
        return told[0]

    text = run_ranks(body, 2)[0]
    assert "gather_objects waits for rank 1 to come to call number 0 among these ranks, in debug mode, since" in text
