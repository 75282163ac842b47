"""What the ranks do in a test: generate, train, infer, and compare with the model in one process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnscaler_integration
from nnscaler_integration import compat
from nnscaler_integration.patching import Patches

from . import cpu
from .cases import Case, Outcome

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
    from nnscaler.runtime.device import uninit_device

    if case.installed:
        nnscaler_integration.install(object_outputs=case.object_outputs)
    folder = [tempfile.mkdtemp(prefix="nnscaler-code-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    try:
        with _asynchronous(case.asynchronous), _repaired(not case.installed):
            return _run(rank, case, name, str(folder[0]))
    finally:
        uninit_device()
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
def _asynchronous(wanted: bool | str) -> Iterator[None]:
    """What ASYNC_COMM=1 sets; ``parallelize`` of 0.8 sets it back, so it is set behind that.

    With "objects", tensors stay synchronous: between stages with several devices, nnScaler itself computes with tensors
    that have not arrived.
    """
    from nnscaler import parallel
    from nnscaler.codegen.emit import FuncEmission
    from nnscaler.flags import CompileFlag

    original: Callable[..., Any] = parallel._compile_flags

    @contextmanager
    def flags(config: Any) -> Iterator[None]:
        with original(config):
            CompileFlag.async_comm = bool(wanted)
            yield

    emit_adapter = FuncEmission.emit_adapter

    def emit_synchronous(self: Any, node: Any, prefix_attr: Any = None, async_op: bool = False) -> Any:
        return emit_adapter(self, node, prefix_attr, False)

    isend = dist.isend
    held: list[Any] = []

    def held_isend(*args: Any, **kwargs: Any) -> Any:
        # 0.8 drops the handle of a tensor's send; gloo then gives the send up.
        held.append(isend(*args, **kwargs))
        return held[-1]

    if wanted:
        parallel._compile_flags = flags
        if wanted == "objects":
            FuncEmission.emit_adapter = emit_synchronous
        elif nnscaler_integration.status().nnscaler == "0.8":
            dist.isend = held_isend
    try:
        yield
        for work in held:
            work.wait()
    finally:
        parallel._compile_flags = original
        FuncEmission.emit_adapter = emit_adapter
        dist.isend = isend


@contextmanager
def _repaired(wanted: bool) -> Iterator[None]:
    """Only what 0.8 needs on a newer torch, without which it generates nothing that could be compared."""
    wanted = wanted and compat.needed(str(nnscaler_integration.status().nnscaler))
    patches = Patches()
    restore = None
    if wanted:
        patches.apply(compat.patches())
        restore = compat.drop_pybind_leaves()
    try:
        yield
    finally:
        patches.revert()
        if restore is not None:
            restore()


@contextmanager
def _generated(rank: int, case: Case, name: str) -> Iterator[Any]:
    """The case's module, generated with the integration."""
    from nnscaler.runtime.device import uninit_device
    from nnscaler.runtime.executor import Executor

    nnscaler_integration.install(object_outputs=case.object_outputs)
    folder = [tempfile.mkdtemp(prefix="nnscaler-code-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    try:
        with _asynchronous(case.asynchronous):
            yield generate(case, name, str(folder[0]))
    finally:
        Executor.clear()
        uninit_device()
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


OBJECTS = Case("Chain", "Staged", {"cuts": (1,), "devices": ((0,), (1,)), "schedule": "1f1b", "micros": 2}, samples=2)
NO_OBJECTS = replace(OBJECTS, arguments={"use": ()})


def _everything_of_nnscaler() -> dict[str, Any]:
    """Every attribute of every module and class of nnScaler that is loaded."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "nnscaler" and module is not None:
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update({f"{name}.{key}.{part}": inner for part, inner in vars(value).items()})
    return found


def install_and_uninstall(rank: int) -> str:
    """Install twice, uninstall twice, and compare nnScaler before and after, attribute by attribute."""
    from nnscaler.graph.tracer import wrap_utils

    import nnscaler_integration.codegen  # so that all of nnScaler that it needs is loaded

    def differing() -> list[str]:
        after = _everything_of_nnscaler()
        assert after.keys() == before.keys()
        return [name for name, value in after.items() if value is not before[name]]

    before = _everything_of_nnscaler()
    leaves = list(wrap_utils.default_autowrap_leaf_function.items())
    nnscaler_integration.install()
    once = differing()
    assert once
    nnscaler_integration.install()
    assert differing() == once
    nnscaler_integration.install(object_outputs=True)
    assert nnscaler_integration.status().object_outputs
    text = str(nnscaler_integration.status())
    nnscaler_integration.install()
    assert not nnscaler_integration.status().object_outputs
    nnscaler_integration.install(object_outputs=True)
    nnscaler_integration.uninstall()
    nnscaler_integration.uninstall()
    assert not differing()
    assert list(wrap_utils.default_autowrap_leaf_function.items()) == leaves
    assert not nnscaler_integration.status().installed
    assert nnscaler_integration.status().reason is None
    return text


def _codes(case: Case, name: str, folder: str, **options: Any) -> str:
    generate(case, name, folder, load_module=False, world=case.plan, **options)
    return "".join(path.read_text() for path in sorted(Path(folder).rglob("gencode*.py")))


def code_around_installing(rank: int) -> dict[str, str]:
    """The code of both ranks before installing, while installed, and after uninstalling."""
    found = {}
    # The first time, nnScaler fills caches of its search for adapters, and numbers what follows otherwise.
    for when in ("first", "before", "installed", "after"):
        for label, case in (("", OBJECTS), (" without objects", NO_OBJECTS)):
            with tempfile.TemporaryDirectory() as folder, _repaired(when != "installed"):
                if when == "installed":
                    nnscaler_integration.install()
                found[when + label] = _codes(case, "around", folder)
                nnscaler_integration.uninstall()
    return found


def reuse_old_code(rank: int, reuse: str) -> dict[str, str]:
    """Generate without, then ask for the same with the integration."""
    with tempfile.TemporaryDirectory() as folder:
        with _repaired(True):
            old = _codes(OBJECTS, "old", folder)
        nnscaler_integration.install()
        new = _codes(OBJECTS, "old", folder, reuse=reuse)
        nnscaler_integration.uninstall()
        return {"old": old, "new": new}


def reuse_loaded_code(rank: int) -> str:
    """The same, where the process has loaded the old code."""
    from nnscaler.parallel import _load_parallel_module_class

    from . import models

    with tempfile.TemporaryDirectory() as folder:
        with _repaired(True):
            _codes(OBJECTS, "loaded", folder)
        _load_parallel_module_class(models.Chain, gen_savedir=folder, instance_name="loaded", rank=1)
        nnscaler_integration.install()
        try:
            _codes(OBJECTS, "loaded", folder, reuse="match")
        except RuntimeError as error:
            return str(error.__cause__)
        finally:
            nnscaler_integration.uninstall()
    return "nothing"


def _kept(case: Case, name: str, installed_first: bool) -> dict[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        if installed_first:
            nnscaler_integration.install()
        with _repaired(not installed_first):
            _codes(case, name, folder)
        paths = sorted(Path(folder).rglob("gencode*.py"))
        for path in paths:
            path.write_text(path.read_text() + "\n# a mark\n")
        nnscaler_integration.install()
        code = _codes(case, name, folder, reuse="match")
        nnscaler_integration.uninstall()
        return {"kept": code.count("# a mark") == len(paths) > 0}


def reuse_code_without_objects(rank: int) -> dict[str, bool]:
    return _kept(NO_OBJECTS, "none", installed_first=False)


def reuse_own_code(rank: int) -> dict[str, bool]:
    return _kept(OBJECTS, "own", installed_first=True)
