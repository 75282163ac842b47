"""install(): in torch's place everywhere, all or none, and back again; and what torch builds on its object calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_gather_object as imported_before
from torch.distributed import distributed_c10d as c10d

import objcomm
from objcomm import torch_compat
from objcomm.torch_compat import calls
from objcomm.torch_compat.groups import NAMES
from tests.ranks import run_ranks
from tests.same import assert_arrived


class _HeldInAClass:
    gather = staticmethod(dist.all_gather_object)


def _held_in_a_default(out: Any, obj: Any, gather: Callable[..., Any] = dist.all_gather_object) -> None:
    gather(out, obj)


_held_in_a_partial = functools.partial(dist.all_gather_object)
_held_by_name = {"gather": imported_before}


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    before = {name: getattr(dist, name) for name in NAMES}
    yield
    torch_compat.uninstall()
    for name, function in before.items():
        setattr(dist, name, function)
        setattr(c10d, name, function)


def _inner(name: str) -> Any:
    """What torch's wrapper of that name calls."""
    return _inner_of(getattr(dist, name))


def _inner_of(function: Any) -> Any:
    return inspect.getclosurevars(function).nonlocals["func"]


def test_install_and_uninstall_may_be_repeated_and_leave_no_trace() -> None:
    before = {name: (getattr(dist, name), getattr(c10d, name), _inner(name)) for name in NAMES}
    signatures = {name: inspect.signature(getattr(dist, name)) for name in NAMES}
    torch_compat.uninstall()
    for _ in range(2):
        torch_compat.install()
        assert torch_compat.is_installed()
        for name in NAMES:
            assert _inner(name) is getattr(torch_compat, name)
            assert inspect.signature(getattr(dist, name)) == signatures[name]
            assert getattr(dist, name).__doc__ == before[name][2].__doc__
    for _ in range(2):
        torch_compat.uninstall()
        assert not torch_compat.is_installed()
        assert {name: (getattr(dist, name), getattr(c10d, name), _inner(name)) for name in NAMES} == before


def test_as_a_context_it_leaves_things_as_they_were() -> None:
    with torch_compat.installed():
        assert torch_compat.is_installed()
        with torch_compat.installed():
            assert torch_compat.is_installed()
        assert torch_compat.is_installed()
    assert not torch_compat.is_installed()
    with pytest.raises(ZeroDivisionError), torch_compat.installed():
        raise ZeroDivisionError
    assert not torch_compat.is_installed()
    torch_compat.install()
    with torch_compat.installed():
        pass
    assert torch_compat.is_installed()


def test_whoever_holds_torchs_functions_calls_what_is_installed() -> None:
    def ranks(rank: int) -> None:
        from tests import test_torch_compat_install as module  # what was held when that module was imported

        def moved() -> int:
            return objcomm.stats()["objects_received"]

        callers: list[Callable[[Any, Any], Any]] = [
            dist.all_gather_object,
            c10d.all_gather_object,
            module._HeldInAClass.gather,
            module._held_in_a_default,
            module._held_in_a_partial,
            module._held_by_name["gather"],
        ]
        for number, call in enumerate(callers):
            out: list[Any] = [None, None]
            before = moved()
            call(out, rank)
            assert (out, moved()) == ([0, 1], before)
            with torch_compat.installed():
                call(out, rank + 10)
            assert (out, moved()) == ([10, 11], before + 1), number
            call(out, rank + 20)
            assert (out, moved()) == ([20, 21], before + 1)

    run_ranks(ranks, 2)


def _is_refused(match: str) -> None:
    before = {name: _inner(name) for name in NAMES if name != "scatter_object_list"}
    with pytest.raises(objcomm.UsageError, match=match):
        torch_compat.install()
    assert not torch_compat.is_installed()
    assert {name: _inner(name) for name in before} == before


def test_what_is_not_as_it_is_known_is_refused_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter_object_list(outputs: Any, inputs: Any = None, src: Any = None) -> None:
        """Somebody else's."""

    with monkeypatch.context() as patch:
        patch.setattr(dist, "scatter_object_list", scatter_object_list)
        _is_refused("scatter_object_list of torch .* cannot be replaced: .*have different ones")
        patch.setattr(c10d, "scatter_object_list", scatter_object_list)
        _is_refused("something else has been put in its place: .*scatter_object_list")
    with monkeypatch.context() as patch:
        other = functools.wraps(scatter_object_list)(lambda *args: scatter_object_list(*args))
        patch.setattr(dist, "scatter_object_list", other)
        patch.setattr(c10d, "scatter_object_list", other)
        _is_refused("something else has been put in its place")
    with monkeypatch.context() as patch:
        patch.setattr(dist.scatter_object_list, "__wrapped__", inspect.unwrap(dist.all_gather_object))
        _is_refused("its wrapper is another one")
    with monkeypatch.context() as patch:
        patch.delattr(c10d, "scatter_object_list")
        _is_refused("have different ones")


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter_object_list(outputs: Any, inputs: Any = None, *, src: Any = None) -> None:
        """As a torch to come might have it."""

    ours = calls.scatter_object_list
    monkeypatch.setattr(calls, "scatter_object_list", scatter_object_list)
    _is_refused("its parameters are scatter_object_output_list, .*known are outputs, inputs")
    monkeypatch.setattr(calls, "scatter_object_list", ours)
    torch_compat.install()


def test_with_fewer_parameters_as_earlier_versions_had_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.4."""

    def broadcast_object_list(object_list: Any, src: Any = 0, group: Any = None, device: Any = None) -> None: ...

    broadcast_object_list.__module__ = c10d.__name__
    wrapped = c10d._exception_logger(broadcast_object_list)
    monkeypatch.setattr(dist, "broadcast_object_list", wrapped)
    monkeypatch.setattr(c10d, "broadcast_object_list", wrapped)
    with torch_compat.installed():
        assert _inner("broadcast_object_list") is torch_compat.broadcast_object_list


def test_a_replacement_by_somebody_else_in_the_meantime_is_theirs_to_undo() -> None:
    torch_compat.install()
    torchs = dist.gather_object

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return torchs(*args, **kwargs)

    dist.gather_object = theirs
    assert _inner_of(torchs) is torch_compat.gather_object
    torch_compat.uninstall()
    assert dist.gather_object is theirs
    assert _inner_of(torchs) is not torch_compat.gather_object


def test_distributed_checkpoints_are_the_same(tmp_path: Path) -> None:
    """torch.distributed.checkpoint plans with gather_object and scatter_object_list, and sends errors that way too."""

    def state(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        return {f"rank{rank}": {"w": torch.randn(300, 200), "step": rank, "name": f"n{rank}"}, "shared": torch.ones(3)}

    def ranks(rank: int) -> None:
        import torch.distributed.checkpoint as dcp

        for installs in (False, True):
            folder = tmp_path / str(installs)
            before = objcomm.stats()["objects_sent"] + objcomm.stats()["objects_received"]
            with torch_compat.installed() if installs else _as_is():
                saved = state(rank)
                dcp.save(saved, checkpoint_id=str(folder))
                loaded = {
                    f"rank{rank}": {"w": torch.zeros(300, 200), "step": -1, "name": ""},
                    "shared": torch.zeros(3),
                }
                dcp.load(loaded, checkpoint_id=str(folder))
                assert_arrived(loaded, saved)
                with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
                    dcp.load({**loaded, "missing": torch.zeros(1)} if rank == 1 else loaded, checkpoint_id=str(folder))
            after = objcomm.stats()["objects_sent"] + objcomm.stats()["objects_received"]
            assert (after > before) is installs
        dist.barrier()
        names = [sorted(path.name for path in (tmp_path / str(installs)).iterdir()) for installs in (False, True)]
        assert names[0] == names[1]

    run_ranks(ranks, 3, timeout=120)


def test_torchs_utilities_for_objects() -> None:
    def ranks(rank: int) -> None:
        from torch.distributed import collective_utils

        utils: Any = collective_utils
        world = dist.group.WORLD

        assert utils.all_gather(lambda: {"rank": rank}, pg=world) == [{"rank": 0}, {"rank": 1}]
        assert utils.broadcast(lambda: torch.ones(2) * rank, rank=1, pg=world).tolist() == [1.0, 1.0]

        def fails() -> int:
            if rank == 1:
                raise ValueError("only here")
            return rank

        with pytest.raises(RuntimeError, match="only here"):
            utils.broadcast(fails, rank=1, pg=world)
        assert objcomm.stats()["objects_received"] > 0

    def installed(rank: int) -> None:
        with torch_compat.installed():
            ranks(rank)

    run_ranks(installed, 2)


def _as_is() -> Any:
    return torch.no_grad()  # a context that changes nothing here
