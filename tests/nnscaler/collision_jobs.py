"""What a rank does in a test of names that are taken already: it returns what was raised, or the weights."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from . import composite_jobs
from .composite_cases import Composed
from .composite_jobs import installed, name_of
from .contexts import repaired


def valued(value: float, cls: type | None = None) -> Any:
    """A module whose weights are all the same number."""
    from . import composite_models

    module = (cls or composite_models.Other)()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def parallelized(module: Any, folder: str, **options: Any) -> Any:
    from nnscaler import ComputeConfig, parallelize

    from . import composite_models

    return parallelize(
        module,
        {"x": torch.randn(2, 4)},
        composite_models.Replicated(),
        ComputeConfig(1, 1, trace_strategy="cpu"),
        gen_savedir=folder,
        **options,
    )


def weights_of(module: Any) -> list[float]:
    return sorted({float(value) for parameter in module.parameters() for value in parameter.reshape(-1)})


def second(rank: int, folder: str, how: str, *, with_integration: bool = True) -> Any:
    """Parallelize one module, then another one of that class with other weights."""
    from . import composite_models

    name = f"{name_of(folder)}_{how}"
    more: dict[str, Any] = {"instance_name": name, "gen_savedir": f"{folder}/a"}
    kinds: dict[str, dict[str, Any]] = {
        "match": {},
        "moo": {"reuse": "moo"},
        "override": {"reuse": "override"},
        "folder": {"gen_savedir": f"{folder}/b"},
        "folder override": {"gen_savedir": f"{folder}/b", "reuse": "override"},
        "name": {"instance_name": f"{name}_2"},
        "class": {},
        "not loaded": {"gen_savedir": f"{folder}/b", "load_module": False},
    }
    options = kinds[how]
    make: type = composite_models.Other
    with composite_jobs.installed() if with_integration else repaired(True):
        one = parallelized(valued(1.0), more.pop("gen_savedir"), **more)
        again = parallelized(valued(1.0), f"{folder}/a", **more)  # the same weights: nothing is wrong with that
        assert weights_of(one) == weights_of(again) == [1.0]
        if how == "class":
            make = type("Other", (make,), {"__module__": make.__module__, "__qualname__": make.__qualname__})
        try:
            other = parallelized(valued(2.0, make), **{"folder": f"{folder}/a", **more, **_renamed(options)})
        except Exception as error:
            return f"{type(error).__name__}: {error} / {error.__cause__}"
        assert weights_of(one) == [1.0]
        return other if other is None else weights_of(other)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {"folder" if key == "gen_savedir" else key: value for key, value in options.items()}


def path_as_name(rank: int, folder: str, name: str) -> str:
    with installed():
        try:
            parallelized(valued(1.0), folder, instance_name=name)
        except Exception as error:
            return f"{error.__cause__}"
    return "nothing"


def shadowed(rank: int, folder: str) -> list[float]:
    """A folder that comes first on the import path has other code under the name: what was asked for is loaded."""
    name = name_of(folder)
    with installed():
        for value, place in ((1.0, "a"), (2.0, "b")):
            parallelized(valued(value), f"{folder}/{place}", instance_name=name, load_module=False)
        sys.path.insert(0, f"{folder}/a")
        try:
            return weights_of(parallelized(valued(2.0), f"{folder}/b", instance_name=name))
        finally:
            sys.path.remove(f"{folder}/a")


def written_again(rank: int, folder: str) -> str:
    """The file of loaded code changes, as another process would write it."""
    name = name_of(folder)
    with installed():
        one = parallelized(valued(1.0), folder, instance_name=name)
        path = Path(str(sys.modules[type(one).__module__].__file__))
        path.write_text(path.read_text() + "\n# written again\n")
        try:
            parallelized(valued(1.0), folder, instance_name=name)
        except RuntimeError as error:
            return str(error.__cause__)
    return "nothing"


def stale_bytecode(rank: int, folder: str) -> float:
    """Code of the same size, written within the same second as what was compiled before, is what runs."""
    from nnscaler_integration import loading

    package = Path(folder) / f"{name_of(folder)}_package"
    package.mkdir()
    path = package / "gencode0.py"
    sys.path.insert(0, folder)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        path.write_text("value = 1.0\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        name = f"{package.name}.gencode0"
        assert importlib.import_module(name).value == 1.0
        del sys.modules[name]
        path.write_text("value = 2.0\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert importlib.import_module(name).value == 1.0  # what Python alone does
        del sys.modules[name]
        return float(loading.load(name, path).value)
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = writes


def stale_folder(rank: int, folder: str, source: str, seed: int, reuse: str) -> Any:
    """One run of a script with the model that ``source`` defines; what an earlier run left in the folder is there."""
    from nnscaler import ComputeConfig

    import nnscaler_integration

    from . import composite_models

    path = Path(folder) / "stale_model.py"
    if rank == 0:
        path.write_text(source)
    torch.distributed.barrier()
    sys.path.insert(0, folder)
    with installed():
        from stale_model import Model  # type: ignore[import-not-found]

        torch.manual_seed(seed + rank)  # only rank 0's weights count
        model = Model()
        torch.manual_seed(seed)
        single = Model()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
        try:
            nnscaler_integration.parallelize_submodules(
                model,
                ["one", "two"],
                dummy_forward_args={"x": x},
                pas_policy=composite_models.Split(),
                compute_config=ComputeConfig(2, 2, trace_strategy="cpu"),
                gen_savedir=f"{folder}/code",
                reuse=reuse,
            )
        except RuntimeError as error:
            return f"{error} / {error.__cause__ and error.__cause__.__cause__}"
        torch.testing.assert_close(model(x), single(x))
        for name in ("one", "two"):
            part = getattr(model, name)
            whole = {**dict(getattr(single, name).named_parameters()), **dict(getattr(single, name).named_buffers())}
            for attribute, meta in part.fullmap.items():
                assert torch.equal(getattr(part, attribute), whole[meta.orig_name][meta.slicers]), attribute
        codes = sorted(Path(folder).rglob("gencode*.py"))
        return [path.stat().st_mtime_ns for path in codes]


def same_names_twice(rank: int, folder: str) -> str:
    """Two models of one class in one process share the code, not the weights; what is cut in another way has none."""
    case, other = Composed(), Composed(seed=1)
    with installed():
        one = composite_jobs.compose(case, folder)
        again = composite_jobs.compose(other, folder)
        assert type(one.first) is type(again.first)
        composite_jobs.compare_tensors(one, composite_jobs.original(case))
        composite_jobs.train(other, again, composite_jobs.original(other), 2)
        composite_jobs.compare_tensors(one, composite_jobs.original(case))
        try:
            composite_jobs.compose(Composed(policy="Replicated"), folder, reuse="moo")
        except RuntimeError as error:
            return f"{error} / {error.__cause__ and error.__cause__.__cause__}"
    return "nothing"


def loaded_by_a_tool(rank: int, folder: str) -> str:
    """What loads generated code by itself."""
    from nnscaler import parallel

    from . import composite_models

    name = name_of(folder)
    with installed():
        for place in ("a", "b"):
            parallelized(valued(1.0), f"{folder}/{place}", instance_name=name, load_module=False)
        parallel._load_parallel_module_class(
            composite_models.Other, gen_savedir=f"{folder}/a", instance_name=name, rank=0
        )
        parallel._load_parallel_module_class(
            composite_models.Other, gen_savedir=f"{folder}/a", instance_name=name, rank=0
        )
        try:
            parallel._load_parallel_module_class(
                composite_models.Other, gen_savedir=f"{folder}/b", instance_name=name, rank=0
            )
        except RuntimeError as error:
            return str(error)
    return "nothing"


def refused(rank: int, folder: str, what: str) -> str:
    """Ask for what is refused; the model is as it was then."""
    from nnscaler import ComputeConfig

    case = Composed()
    options: dict[str, Any] = {
        "end2end": {"compute_config": ComputeConfig(2, 2, use_end2end=True)},
        "arguments": {"dummy_forward_args": {"x": torch.zeros(2, 4), "y": 1}},
        "option": {"instance_name": "mine"},
        "nothing given": {"pas_policy": None},
        "not installed": {},
        "failing": {"pas_policy": _fail},
        "again": {},
    }[what]
    model = composite_jobs.original(case)
    if what == "again":
        with installed():
            composite_jobs.compose(case, folder, model=model)
    before = list(model.named_modules())
    try:
        if what == "not installed":
            composite_jobs.compose(case, folder, model=model)
        else:
            with installed():
                composite_jobs.compose(
                    case, folder, model=model, **({"marked": ("first",)} if what == "again" else options)
                )
    except Exception as error:
        assert [id(module) for _, module in model.named_modules()] == [id(module) for _, module in before]
        cause = error.__cause__
        return f"{type(error).__name__}: {error} / {cause and cause.__cause__}"
    return "nothing"


def _fail(graph: Any, config: Any) -> Any:
    raise ArithmeticError("the policy cannot do it")


def second_alone(rank: int, folder: str, how: str) -> Any:
    return second(rank, folder, how, with_integration=False)


def other_class(rank: int, folder: str) -> str:
    """A class that took the name of another, with the same weights."""
    from . import composite_models

    first = composite_models.Other
    made = type("Other", (first,), {"__module__": first.__module__, "__qualname__": first.__qualname__})
    with installed():
        parallelized(valued(1.0), folder, instance_name=name_of(folder))
        try:
            parallelized(valued(1.0, made), folder, instance_name=name_of(folder))
        except RuntimeError as error:
            return str(error)
    return "nothing"
