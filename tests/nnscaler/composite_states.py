"""What the ranks do in a test of the state of a composed model: saved, merged, loaded, looked at."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnscaler_integration

from .composite_cases import Composed
from .composite_jobs import compare_tensors, compose, installed, name_of, original, parallel_modules, step, train


def save(rank: int, case: Composed, folder: str) -> None:
    """Train, then save the state of every rank and the model itself."""
    with installed():
        model, single = compose(case, folder), original(case)
        one, other = train(case, model, single, 2)
        torch.save((model.state_dict(), other.state_dict()), Path(folder) / f"state{rank}.pt")
        torch.save(model, Path(folder) / f"model{rank}.pt")
        part = next(iter(parallel_modules(model).values()))
        (Path(folder) / f"class{rank}.pickle").write_bytes(pickle.dumps(type(part)))
        if rank == 0:
            torch.save((single.state_dict(), one.state_dict()), Path(folder) / "single.pt")
    dist.barrier()


def states(folder: str, count: int) -> tuple[list[Any], list[Any]]:
    loaded = [torch.load(Path(folder) / f"state{rank}.pt", weights_only=False) for rank in range(count)]
    return [model for model, _ in loaded], [optimizer for _, optimizer in loaded]


def merge(rank: int, case: Composed, folder: str) -> list[str]:
    """Merge what every rank saved, compare it with the model in one process, and load it there and here."""
    import nnscaler

    with installed():
        merged, optimizer = nnscaler.merge_state_dicts(*states(folder, dist.get_world_size()))
        single, (expected, its) = original(case), torch.load(Path(folder) / "single.pt")
        complete = nnscaler_integration.with_tied(merged, single)
        assert complete.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(complete[name], value, rtol=1e-5, atol=1e-6)
        assert optimizer is not None and optimizer["state"].keys() == its["state"].keys()
        for number, values in its["state"].items():
            torch.testing.assert_close(optimizer["state"][number], values, rtol=1e-5, atol=1e-6)
        single.load_state_dict(complete)
        # Weights of another seed, so that what is right came from the state.
        model = compose(case, folder, model=original(replace(case, seed=5)), name=f"{name_of(folder)}_merged")
        fresh, own = original(replace(case, seed=5)), copy.deepcopy(single)
        for part in (fresh, own):
            for name, buffer in part.named_buffers():
                if name not in expected:
                    buffer.copy_(dict(model_buffers(case))[name])
        one = torch.optim.Adam(own.parameters(), lr=0.05)
        one.load_state_dict(its)
        other = nnscaler.build_optimizer(model, torch.optim.Adam, lr=0.05)
        nnscaler.load_merged_state_dict(model, merged, other, optimizer)
        compare_tensors(model, own)
        step(case, model, own, one, other, range(2, 4))
        return sorted(merged)


def model_buffers(case: Composed) -> Any:
    return original(replace(case, seed=5)).named_buffers()


def deduped(rank: int, case: Composed, folder: str) -> int:
    """nnScaler's own way to save each tensor once, and to load it on every rank."""
    import nnscaler

    with installed():
        model, single = compose(case, folder), original(case)
        one, other = train(case, model, single, 2)
        own, optimizer = nnscaler.deduped_state_dict(model, other)
        saved = copy.deepcopy((own, optimizer))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, saved)
        merged, _ = nnscaler.merge_state_dicts(*map(list, zip(*gathered, strict=True)))
        complete = nnscaler_integration.with_tied(merged, single)
        for name, value in single.state_dict().items():
            torch.testing.assert_close(complete[name], value, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for value in [*model.parameters()]:
                value.zero_()
        nnscaler.load_deduped_state_dict(model, *(saved[0], other, saved[1]))
        compare_tensors(model, single)
        step(case, model, single, one, other, range(2, 3))
        return len(own)


def load_saved(rank: int, case: Composed, folder: str) -> int:
    """In a process that generated and loaded nothing: the model as it was saved, trained on."""
    with installed():
        model = torch.load(Path(folder) / f"model{rank}.pt", weights_only=False)
        single = original(case)
        single.load_state_dict(torch.load(Path(folder) / "single.pt")[0])
        count = compare_tensors(model, single)
        assert pickle.loads((Path(folder) / f"class{rank}.pickle").read_bytes()) is type(model.first)
        train(case, model, single, 2, first=7)
        return count


def look_at_saved(rank: int, folder: str) -> tuple[list[str], str, str]:
    """On one rank: what two ranks saved can be read and merged, and does not run."""
    import nnscaler

    with installed():
        sys.path.append(folder)
        kind = pickle.loads((Path(folder) / "class1.pickle").read_bytes())
    models = [torch.load(Path(folder) / f"model{number}.pt", weights_only=False) for number in range(2)]
    merged, _ = nnscaler.merge_state_dicts([model.state_dict() for model in models])
    single = torch.load(Path(folder) / "single.pt")[0]
    for name, value in single.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6)
    again = copy.deepcopy(pickle.loads(pickle.dumps(models[1])))
    assert type(again.first) is kind
    for (name, value), (other, expected) in zip(again.named_parameters(), models[1].named_parameters(), strict=True):
        assert name == other and torch.equal(value, expected)
    said = []
    for call in (again, again.first, again.first.train_step, again.second.sync_grad):
        try:
            call(torch.zeros(2, 4))
        except RuntimeError as error:
            said.append(str(error))
    return sorted(merged), " / ".join(said), kind.__module__
