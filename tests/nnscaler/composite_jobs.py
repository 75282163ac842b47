"""What the ranks do in a test of models with several parallelized submodules."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnscaler_integration

from . import cpu

cpu.pretend()
nnscaler_integration.status()  # finds nnScaler in a checkout too


@dataclass(frozen=True)
class Composed:
    """One configuration.

    Args:
        model: name of a class in composite_models.py.
        marked: names of classes there, or qualified names of submodules.
        policy: name of a class there.
        plan: devices of one replica.
        config: more arguments of ComputeConfig.
        seed: of the weights.
        optimizer: name of one of torch's.
    """

    model: str = "Two"
    marked: tuple[str, ...] = ("Block",)
    policy: str = "Split"
    plan: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    optimizer: str = "Adam"


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
        model = compose(
            case, folder, model=original(Composed(**{**vars(case), "seed": 5})), name=f"{name_of(folder)}_merged"
        )
        fresh, own = original(Composed(**{**vars(case), "seed": 5})), copy.deepcopy(single)
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
    return original(Composed(**{**vars(case), "seed": 5})).named_buffers()


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
    import sys

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
