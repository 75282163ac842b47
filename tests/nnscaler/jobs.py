"""What the ranks do in a test: generate, train, infer, and compare with the model in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnscaler_integration

from . import cpu
from .cases import Case, Outcome
from .contexts import asynchronous, repaired

cpu.pretend()
nnscaler_integration.status()  # finds nnScaler in a checkout too


def sample(number: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The sample with a number; the sizes in it differ from sample to sample."""
    random = torch.Generator().manual_seed(number)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return values(2, 4), {
        "content": {"bias": values(4), "scale": 1.0 + 0.25 * number},
        "pieces": [values(1 + (number + index) % 3) for index in range(1 + number % 4)],
        "number": 2 + number,
        "text": "text" * number,
        "listed": [0.5 * number, "x"],
    }


def run_case(rank: int, case: Case, name: str) -> Outcome:
    """Generate the case's module as ``parallelize`` does, run it, and compare on every rank."""
    if case.installed:
        nnscaler_integration.install(object_outputs=case.object_outputs)
    folder = [tempfile.mkdtemp(prefix="nnscaler-code-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    try:
        with asynchronous(case.asynchronous), repaired(not case.installed):
            return _run(rank, case, name, str(folder[0]))
    finally:
        nnscaler_integration.uninstall()


def _run(rank: int, case: Case, name: str, folder: str) -> Outcome:
    from nnscaler import build_optimizer
    from nnscaler.runtime.executor import AsyncCommHandler, Executor

    world = dist.get_world_size()
    module = generate(case, name, folder)
    code = generated_code(folder, rank)
    replica, replicas = rank // case.plan, world // case.plan
    batches = [
        [[sample(100 * step + 10 * r + index) for index in range(case.samples)] for r in range(replicas)]
        for step in range(case.steps)
    ]
    single = make_model(case)
    parameters = parameters_of(single)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
    parallel_optimizer = None if case.infer_only else build_optimizer(module, torch.optim.SGD, lr=0.01)
    losses: list[torch.Tensor] = []
    compared = 0
    returned: Any = None
    for batch in batches:
        with torch.no_grad():
            expected = [single(*one) for one in batch[replica]]
            returned = arrived(module.infer_step(batch[replica]))
        compare(returned, expected)
        if case.infer_only:
            continue
        optimizer.zero_grad()
        for one in [one for samples in batch for one in samples]:
            loss = single(*one)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
        returned = arrived(module.train_step(batch[replica]))
        compare(returned, expected)
        assert parallel_optimizer is not None
        parallel_optimizer.step()
        parallel_optimizer.zero_grad()
        optimizer.step()
        compared = compare_parameters(module, parameters)
        losses += [loss]
    Executor.check_clear()
    AsyncCommHandler().check_clear()
    first = returned[0] if not isinstance(returned[0], (tuple, list)) else returned[0][0]
    return Outcome(code, float(first), compared, outputs=detach(returned))


def make_model(case: Case) -> Any:
    from . import models

    torch.manual_seed(0)
    return getattr(models, case.model)(**case.arguments).train()


def generate(case: Case, name: str, folder: str, world: int | None = None, **options: Any) -> Any:
    from nnscaler import ComputeConfig, parallelize

    from . import policies

    policy: Any = getattr(policies, case.policy, case.policy)
    if isinstance(policy, type):
        policy = policy(**case.options)
    x, content = sample(1)
    config = {
        "use_end2end": True,
        "inference_only": case.infer_only,
        "trace_strategy": "cpu",
        **case.config,
    }
    options = {"reuse": "override", "load_module": True, **options}
    return parallelize(
        make_model(case),
        {"x": x, "content": content},
        policy,
        ComputeConfig(case.plan, world or dist.get_world_size(), **config),
        gen_savedir=folder,
        instance_name=name,
        **options,
    )


def generated_code(folder: str, rank: int) -> str:
    (path,) = Path(folder).rglob(f"gencode{rank}.py")
    return path.read_text()


def parameters_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters by the names that nnScaler gives them: those in a plain list become constants of the module."""
    named = dict(model.named_parameters())
    if not named:
        # The tracer numbers the modules that it finds: each layer and the linear in it.
        layers = enumerate(model.layers)
        named = {f"_module_constants.{2 * number}.linear.weight": layer.linear.weight for number, layer in layers}
    return named


def compare_parameters(module: Any, expected: dict[str, torch.nn.Parameter]) -> int:
    """Compare this rank's parameters after a step, so all gradients, with those of one process. Returns how many."""
    count = 0
    for name, parameter in module.named_parameters():
        meta = module.fullmap[name]
        torch.testing.assert_close(parameter.data, expected[meta.orig_name].data[meta.slicers], rtol=1e-5, atol=1e-7)
        count += 1
    return count


def compare(found: Any, expected: Any) -> None:
    """Compare nested values."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            compare(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
    elif hasattr(expected, "__dict__"):
        assert type(found) is type(expected)
        compare(vars(found), vars(expected))
    else:
        assert found == expected and type(found) is type(expected)


def arrived(returned: Any) -> Any:
    """With asynchronous communication, 0.8 returns losses that are still on their way."""
    from nnscaler.runtime.executor import Executor

    for part in returned:
        Executor.sync_tensors(part if isinstance(part, (list, tuple)) else [part])
    return returned


def detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detach(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [detach(part) for part in value]
    return {"class": type(value).__name__, **detach(vars(value))} if hasattr(value, "__dict__") else value


@contextmanager
def _generated(rank: int, case: Case, name: str) -> Iterator[Any]:
    """The case's module, generated with the integration."""
    from nnscaler.runtime.executor import Executor

    nnscaler_integration.install(object_outputs=case.object_outputs)
    folder = [tempfile.mkdtemp(prefix="nnscaler-code-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    try:
        with asynchronous(case.asynchronous):
            yield generate(case, name, str(folder[0]))
    finally:
        Executor.clear()
        nnscaler_integration.uninstall()


def objects_alive(rank: int, case: Case, name: str, micros: int) -> int:
    """The largest number of moved objects that this rank holds at a time, in a step of ``micros`` micro-batches."""
    from . import models

    case = replace(case, options={**case.options, "micros": micros}, samples=micros)
    with _generated(rank, case, name) as module:
        models.Made.alive.clear()
        models.Made.most = 0
        arrived(module.train_step([sample(index) for index in range(micros)]))
        return models.Made.most


def gradient_lost(rank: int, case: Case, name: str) -> tuple[str, str]:
    """Infer, then train, with an object that hides a tensor that requires grad. Returns what was raised."""
    with _generated(rank, case, name) as module:
        with torch.no_grad():
            expected = make_model(case)(*sample(1))
        compare(module.infer_step([sample(1)]), [expected])
        try:
            module.train_step([sample(1)])
        except Exception as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def trained(rank: int, case: Case, name: str) -> tuple[str, str]:
    """Train one step. Returns what was raised."""
    with _generated(rank, case, name) as module:
        try:
            arrived(module.train_step([sample(index) for index in range(case.samples)]))
        except Exception as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def call_module(rank: int, case: Case, name: str) -> int:
    """Call the generated module as any other, and compare loss and parameters after a step."""
    from nnscaler import build_optimizer

    with _generated(rank, case, name) as module:
        single = make_model(case)
        optimizers = [torch.optim.SGD(single.parameters(), lr=0.01), build_optimizer(module, torch.optim.SGD, lr=0.01)]
        x, content = sample(3)
        # 0.8 demands None for what a rank does not use: the object that is made of it comes from rank 0.
        losses = [single(x, content), module(x, content if rank == 0 else None)]
        compare(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
        return compare_parameters(module, parameters_of(single))


def strict_transfers(rank: int, case: Case, name: str, control: bool) -> dict[str, int]:
    """How many transfers of each dtype went over the strict group that stands for the accelerators' own."""
    import objcomm
    from tests.strict_backend import StrictGroup

    seen: dict[str, int] = {}
    send = StrictGroup.send

    def counted(self: Any, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        seen[str(tensors[0].dtype)] = seen.get(str(tensors[0].dtype), 0) + 1
        return send(self, tensors, dst, tag)

    init_control = objcomm.init_control
    if not control:
        objcomm.init_control = lambda group=None: None
    try:
        with _generated(rank, case, name) as module:
            samples = [sample(index) for index in range(case.samples)]
            StrictGroup.send = counted  # type: ignore[method-assign]
            module.train_step(samples)
    finally:
        StrictGroup.send = send  # type: ignore[method-assign]
        objcomm.init_control = init_control
    return seen
