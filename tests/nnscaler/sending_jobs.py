"""What the ranks do in a test of generated modules that travel to another rank."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import objcomm

from .composite_cases import Composed
from .composite_jobs import compare_tensors, compose, installed, name_of, original, parallel_modules, train


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def there_and_back(rank: int, case: Composed, folder: str) -> dict[str, Any]:
    """Rank 0's model goes to rank 1, where it is looked at, and back, where it runs."""
    found: dict[str, Any] = {}
    with installed():
        model, single = compose(case, folder), original(case)
        with torch.no_grad():  # not what is in the files beside the code
            for parameter in [*model.parameters(), *single.parameters()]:
                parameter.mul_(1.5)
        if rank == 0:
            objcomm.send_object({"model": model, "first": model.first}, 1)
            objcomm.send_object(model.state_dict(), 1)
            back = objcomm.recv_object(1)
        else:
            got = objcomm.recv_object(0)
            state = objcomm.recv_object(0)
            assert got["first"] is got["model"].first
            for place, part in parallel_modules(got["model"]).items():
                own = parallel_modules(model)[place]
                assert type(part) is not type(own)
                assert (type(part).rank, type(own).rank) == (0, 1)
            mine = got["model"].state_dict()
            assert mine.keys() == state.keys()
            assert all(torch.equal(mine[name], value) for name, value in state.items() if torch.is_tensor(value))
            found["said"] = refusal(lambda: got["model"](torch.zeros(2, 4)))
            kinds = [type(part) for part in parallel_modules(got["model"]).values()]
            found["classes"] = len(set(kinds))
            objcomm.send_object(got["model"], 0)
            back = model
        compare_tensors(back, single)
        train(case, back, single, 2, first=3)
    return found


def not_there(rank: int, folder: str, how: str) -> dict[str, str]:
    """The receiver cannot have the sender's code: it is refused, and the pair works afterwards."""
    case, found = Composed(), {}
    with installed():
        model = compose(case, folder)
        path = Path(str(sys.modules[type(model.first).__module__].__file__)).with_name("gencode0.py")
        if rank == 0:
            text = path.read_text()
            if how == "removed":
                path.unlink()
            elif how == "changed":
                path.write_text(text + "\nraise SystemExit('other code was run')\n")
            elif how == "imported":
                path.write_text(text.replace("torch.tanh", "torch.sin"))
            dist.barrier()
            dist.barrier()
            path.write_text(text) if how == "imported" else None
            dist.barrier()
            found["sent"] = refusal(lambda: objcomm.send_object(model.first, 1))
            objcomm.send_object("afterwards", 1)
        else:
            dist.barrier()
            if how == "loaded":
                _load_other(folder, model)
            elif how == "imported":
                finder = sys.meta_path.pop(0)  # as before the integration was installed
                importlib.import_module(type(model.first).__module__[:-1] + "0")
                sys.meta_path.insert(0, finder)
            dist.barrier()
            dist.barrier()
            found["received"] = refusal(lambda: objcomm.recv_object(0))
            found["then"] = str(objcomm.recv_object(0))
    return found


def _load_other(folder: str, model: Any) -> None:
    """Rank 0's code of another folder, under the same name."""
    from nnscaler import ComputeConfig, parallelize
    from nnscaler.parallel import _load_parallel_module_class

    from . import composite_models

    name = f"{name_of(folder)}.first"
    # By itself, on this rank: what another run left here.
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        parallelize(
            composite_models.Block(),
            {"x": torch.randn(2, 4)},
            composite_models.Replicated(),
            ComputeConfig(2, 2, trace_strategy="cpu"),
            gen_savedir=f"{folder}/other",
            instance_name=name,
            load_module=False,
        )
    finally:
        dist.is_initialized = initialized
    _load_parallel_module_class(composite_models.Block, gen_savedir=f"{folder}/other", instance_name=name, rank=0)


def restricted(rank: int, folder: str) -> dict[str, str]:
    """Restricted trust, of the sender or of the receiver alone, refuses it, and its code is not loaded."""
    found = {}
    with installed():
        model = compose(Composed(), folder)
        name = type(model.first).__module__[:-1] + "0"
        for who in (0, 1):
            objcomm.configure(trust="restricted" if rank == who else "cluster")
            if rank == 0:
                found[f"sent {who}"] = refusal(lambda: objcomm.send_object(model.first, 1))
            else:
                found[f"received {who}"] = refusal(lambda: objcomm.recv_object(0))
                assert name not in sys.modules
        objcomm.configure(trust="cluster")
    return found


def class_alone(rank: int, folder: str) -> str:
    """A class of rank 0's plan arrives as itself; where its file has other code, it is refused."""
    with installed():
        model = original(Composed())
        model.third = type(model.first)()
        compose(Composed(), folder, model=model)
        if rank == 0:
            objcomm.send_object([type(model.first), model.second, type(model.second), model.first], 1)
            path = Path(str(sys.modules[type(model.third).__module__].__file__))
            path.write_text(path.read_text().replace("torch.tanh", "torch.sin"))
            objcomm.send_object(type(model.third), 1)
            return ""
        kind, second, other, first = objcomm.recv_object(0)
        assert (type(first), type(second)) == (kind, other) and kind is not other and (kind.rank, other.rank) == (0, 0)
        assert kind is not type(model.first) and other is not type(model.second)
        # Making one is a matter of all ranks in general, but this plan has made its groups already.
        assert "rank 0's code" in refusal(lambda: kind()(torch.zeros(2, 4)))
        assert "does not run here" in refusal(lambda: copy.deepcopy(other()).sync_grad())
        assert "forward" in vars(kind()) and "forward" not in vars(type(model.first)())
        return refusal(lambda: objcomm.recv_object(0))
