"""What the ranks do in a test of models with several parallelized submodules."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnscaler_integration

from . import cpu
from .composite_cases import Composed

cpu.pretend()
nnscaler_integration.status()  # finds nnScaler in a checkout too


@contextmanager
def installed() -> Iterator[None]:
    nnscaler_integration.install()
    try:
        yield
    finally:
        nnscaler_integration.uninstall()


def original(case: Composed) -> Any:
    from . import composite_models

    torch.manual_seed(case.seed)
    return getattr(composite_models, case.model)()


def config(case: Composed) -> Any:
    from nnscaler import ComputeConfig

    return ComputeConfig(case.plan, dist.get_world_size(), trace_strategy="cpu", **case.config)


def compose(case: Composed, folder: str, **options: Any) -> Any:
    from . import composite_models

    marked = [getattr(composite_models, name, name) for name in options.pop("marked", case.marked)]
    options.setdefault("name", name_of(folder))
    arguments = {
        "dummy_forward_args": {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(7))},
        "pas_policy": getattr(composite_models, case.policy)(),
        "compute_config": config(case),
        "gen_savedir": folder,
    }
    model = options.pop("model", None) or original(case)
    return nnscaler_integration.parallelize_submodules(model, marked, **{**arguments, **options})


def name_of(folder: str) -> str:
    """The ranks live on from test to test, and each test has names of its own."""
    return Path(folder).name


def sample(step: int, replica: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + replica))


def parallel_modules(model: Any) -> dict[str, Any]:
    from nnscaler import ParallelModule

    return {place: module for place, module in model.named_modules() if isinstance(module, ParallelModule)}


def compare_tensors(model: Any, single: Any, gradients: bool = False) -> int:
    """Compare every parameter and buffer, or every gradient, with those of the model in one process."""
    expected = {**dict(single.named_parameters()), **dict(single.named_buffers())}
    parts = parallel_modules(model)
    compared = 0
    for name, value in [*model.named_parameters(), *([] if gradients else model.named_buffers())]:
        place, _, last = name.rpartition(".")
        if place in parts:
            meta = parts[place].fullmap[last]
            name, slicers = f"{place}.{meta.orig_name}", meta.slicers
        else:
            slicers = ()
        other = expected[name]
        if gradients:
            value, other = value.grad, other.grad
        value, other = value.detach(), other.detach()[slicers]
        shard = (
            parts[place].get_zero3_attr_meta(last)
            if place in parts and hasattr(parts[place], "get_zero3_attr_meta")
            else None
        )
        if shard is not None:  # this rank has a part of the parameter, padded
            value, other = value.reshape(-1)[: shard.end - shard.start], other.reshape(-1)[shard.start : shard.end]
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=f"{name} differs")
        compared += 1
    return compared


def train(case: Composed, model: Any, single: Any, steps: int, first: int = 0) -> tuple[Any, Any]:
    """Train both with the same samples, comparing losses, gradients and parameters; returns the optimizers."""
    from nnscaler import build_optimizer

    kind = getattr(torch.optim, case.optimizer)
    one, other = kind(single.parameters(), lr=0.05), build_optimizer(model, kind, lr=0.05)
    step(case, model, single, one, other, range(first, first + steps))
    return one, other


def step(case: Composed, model: Any, single: Any, one: Any, other: Any, numbers: Any) -> None:
    replica, replicas = dist.get_rank() // case.plan, dist.get_world_size() // case.plan
    zero = bool(case.config.get("use_zero"))
    for number in numbers:
        losses = [single(sample(number, index)) for index in range(replicas)]
        sum(losses).backward()
        loss = model(sample(number, replica))
        torch.testing.assert_close(loss.detach(), losses[replica].detach(), rtol=1e-5, atol=1e-6)
        loss.backward()
        other.sync_shard_grad()
        if not zero:  # it keeps a part of the gradients only
            assert compare_tensors(model, single, gradients=True) > 0
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
        compare_tensors(model, single)


def run(rank: int, case: Composed, folder: str) -> dict[str, str]:
    """Parallelize, compare and train; returns the class of every part, and the file that it is from."""
    import sys

    with installed():
        before = torch.get_rng_state() if rank else None
        model, single = compose(case, folder), original(case)
        assert compare_tensors(model, single) > 4
        torch.manual_seed(case.seed)  # what the ranks draw next is the same
        train(case, model, single, 3)
        if before is not None:
            assert model.training
        return {
            place: f"{type(part).__name__} {sys.modules[type(part).__module__].__file__}"
            for place, part in parallel_modules(model).items()
        }


def draws_alike(rank: int, case: Composed, folder: str) -> tuple[list[float], float]:
    """What the next random numbers are, without and with parallelizing in between."""
    with installed():
        random.seed(0)
        model = original(case)
        torch.manual_seed(3)
        compose(case, folder, model=model)
        drawn = torch.rand(3)
        torch.manual_seed(3)
        return drawn.tolist(), float((drawn - torch.rand(3)).abs().sum())


def copies(rank: int, case: Composed, folder: str) -> list[str]:
    """Deepcopy, pickle, torch.save and load; what comes out is trained on, beside the original."""
    import cloudpickle

    path = Path(folder) / f"model{rank}.pt"
    done = []
    with installed():
        model, single = compose(case, folder), original(case)
        train(case, model, single, 1)

        def saved() -> Any:
            torch.save(model, path)
            return torch.load(path, weights_only=False)

        for name, made in (
            ("deepcopy", lambda: copy.deepcopy(model)),
            ("pickle", lambda: pickle.loads(pickle.dumps(model))),
            ("cloudpickle", lambda: pickle.loads(cloudpickle.dumps(model))),
            ("torch.save", saved),
        ):
            again, alone = made(), copy.deepcopy(single)
            assert compare_tensors(again, alone) > 4
            train(case, again, alone, 2, first=5)
            for place, part in parallel_modules(again).items():
                own = parallel_modules(model)[place]
                assert type(part) is type(own) and part is not own
                assert all(
                    a.data_ptr() != b.data_ptr() for a, b in zip(part.parameters(), own.parameters(), strict=True)
                )
            done.append(name)
        compare_tensors(model, single)  # it did not change meanwhile
    return done


def classes(rank: int, folder: str) -> list[str]:
    """Every generated class pickles as itself, whatever the original was called; the instances too."""
    from . import composite_models

    class Local(composite_models.Block):
        pass

    class Outer:
        class Block(composite_models.Block):
            pass

    names = []
    with installed():
        model = torch.nn.Sequential(
            composite_models.Block(), Local(), Outer.Block(), composite_models.Nested.Block(), composite_models.Block()
        )
        compose(Composed(marked=("0", "1", "2", "3", "4")), folder, model=model)
        kinds = [type(part) for part in model]
        assert len(set(kinds)) == len(kinds)
        for part, kind in zip(model, kinds, strict=True):
            assert pickle.loads(pickle.dumps(kind)) is kind
            assert copy.deepcopy(kind) is kind
            assert type(pickle.loads(pickle.dumps(part))) is kind
            names.append(f"{kind.__name__} {kind.__qualname__}")
    return names


def objects(rank: int, folder: str) -> str:
    """Objects move between the devices of each of two parts. Returns this rank's code of one."""
    import sys

    from nnscaler import ComputeConfig, build_optimizer

    from . import composite_models, jobs, policies

    x, content = jobs.sample(3)
    with installed():
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(composite_models.Contexts())
        single, model = models
        for part in (model.first, model.second):
            nnscaler_integration.mark(part, dummy_forward_args={"x": x, "content": content})
        nnscaler_integration.parallelize_submodules(
            model,
            pas_policy=policies.Flat(single=("make_pieces",)),
            compute_config=ComputeConfig(2, 2, trace_strategy="cpu"),
            gen_savedir=folder,
            name=name_of(folder),
        )
        optimizers = [torch.optim.SGD(single.parameters(), lr=0.1), build_optimizer(model, torch.optim.SGD, lr=0.1)]
        for number in range(3):
            x, content = jobs.sample(number)
            losses = [single(x, content), model(x, content)]
            torch.testing.assert_close(losses[1], losses[0])
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            compare_tensors(model, single)
        return Path(str(sys.modules[type(model.first).__module__].__file__)).read_text()


def frozen(rank: int, folder: str) -> int:
    """What needs no gradient stays as it is."""
    case = Composed(optimizer="SGD")
    with installed():
        model, single = original(case), original(case)
        for one in (model, single):
            one.first.up.weight.requires_grad_(False)
            one.second.eval()
        compose(case, folder, model=model)
        assert not model.second.training and model.first.training
        train(case, model, single, 2)
        return compare_tensors(model, single)
