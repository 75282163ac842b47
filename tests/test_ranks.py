"""The harness itself: what it reports, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks


class Pair(NamedTuple):
    """By reference: a rank must see this very class."""

    rank: int
    total: torch.Tensor


def _sum_of_ranks(rank: int, extra: float) -> Pair:
    total = torch.full((3,), rank + extra)
    dist.all_reduce(total)
    return Pair(rank, total)


def _leave_pid(rank: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))


def _assert_gone(folder: Path, count: int) -> None:
    pids = [int(file.read_text()) for file in folder.iterdir()]
    assert len(pids) == count
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_results_come_by_rank() -> None:
    results = run_ranks(_sum_of_ranks, 3, 0.5)
    assert [r.rank for r in results] == [0, 1, 2]
    assert all(type(r) is Pair and torch.equal(r.total, torch.full((3,), 4.5)) for r in results)


def test_closures_environment_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_KEPT", "kept")
    monkeypatch.setenv("RANKS_REMOVED", "x")
    local = {"a": 1}

    def body(rank: int) -> tuple[object, ...]:
        kept, given, own = (os.environ[name] for name in ("RANKS_KEPT", "RANKS_SET", "RANK"))
        return local, kept, given, "RANKS_REMOVED" in os.environ, own, torch.get_num_threads()

    results = run_ranks(body, 2, env={"RANKS_SET": "1", "RANKS_REMOVED": None}, backend=None)
    assert results == [({"a": 1}, "kept", "1", False, str(rank), 1) for rank in range(2)]


def test_no_backend_leaves_the_initialisation_to_the_function() -> None:
    def body(rank: int) -> int:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return dist.get_world_size()

    assert run_ranks(body, 2, backend=None) == [2, 2]


def test_exception_fails_with_the_traceback_of_its_rank(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        _leave_pid(rank, str(tmp_path))
        print(f"printed by {rank}")
        while rank == 1 and not (tmp_path / "0").exists():
            time.sleep(0.01)
        if rank == 1:
            raise ValueError("only here")
        time.sleep(30)

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(body, backend=None)
    text = str(caught.value)
    assert text.index("rank 1 raised:") < text.index("rank 0 still running when it was ended")
    assert "ValueError: only here" in text
    assert 'raise ValueError("only here")' in text
    assert __file__ in text
    assert "printed by 1" in text
    assert time.monotonic() - start < 20
    _assert_gone(tmp_path, 2)


def test_hang_fails_with_the_stack_of_every_rank(tmp_path: Path) -> None:
    def stuck_here(rank: int) -> None:
        _leave_pid(rank, str(tmp_path))
        if rank == 0:
            dist.recv(torch.zeros(1), src=1)
        while True:
            time.sleep(1)

    with pytest.raises(RankFailure) as caught:
        run_ranks(stuck_here, timeout=5)
    text = str(caught.value)
    assert text.count("hangs: still running after 5 s") == 2
    assert text.count("in stuck_here") == 2
    assert "in recv" in text
    _assert_gone(tmp_path, 2)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGABRT])
def test_dead_rank_fails_the_run_unless_it_may_die(tmp_path: Path, sig: signal.Signals) -> None:
    def body(rank: int) -> int:
        _leave_pid(rank, str(tmp_path))
        if rank == 0:
            os.kill(os.getpid(), sig)
        return rank

    with pytest.raises(RankFailure, match=f"rank 0 died without a result: signal {sig.name}"):
        run_ranks(body, backend=None)
    assert run_ranks(body, backend=None, may_die=[0]) == [None, 1]
    _assert_gone(tmp_path, 2)


def test_exit_without_a_result() -> None:
    def body(rank: int) -> None:
        os._exit(7 * rank)

    with pytest.raises(RankFailure, match="rank 1 died without a result: exit code 7"):
        run_ranks(body, backend=None, may_die=[0])


def test_rank_that_does_not_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks._EXIT_GRACE", 2.0)

    def body(rank: int) -> None:
        import threading

        _leave_pid(rank, str(tmp_path))
        if rank == 1:
            threading.Thread(target=time.sleep, args=(60,)).start()

    with pytest.raises(RankFailure, match="rank 1 returned from its function but did not end"):
        run_ranks(body)
    _assert_gone(tmp_path, 2)


def test_early_rank_stays_until_all_have_returned() -> None:
    def body(rank: int) -> float:
        tensor = torch.tensor([1.0])
        if rank == 0:
            dist.isend(tensor, dst=1).wait()
        else:
            time.sleep(0.5)
            dist.recv(tensor, src=0)
            dist.irecv(tensor, src=0)  # would fail at once, had the peer gone
        return time.monotonic()

    assert len(run_ranks(body)) == 2


def test_result_that_cannot_travel_names_the_rank() -> None:
    def body(rank: int) -> object:
        import threading

        return threading.Lock() if rank == 1 else None

    with pytest.raises(RankFailure, match=r"rank 1 raised:[\s\S]*lock"):
        run_ranks(body, backend=None)


def test_warnings_are_as_strict_in_ranks_as_here() -> None:
    def body(rank: int) -> None:
        warnings.warn("a warning of rank", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailure, match="UserWarning: a warning of rank"):
            run_ranks(body, backend=None)
        warnings.simplefilter("ignore")
        run_ranks(body, backend=None)
