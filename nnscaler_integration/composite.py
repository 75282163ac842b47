"""Parallelizing several submodules of one model in one call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import objcomm

from . import weights
from .selection import Marked, Selected, fingerprint, instance_name, select
from .state import status
from .ties import keep_once, tied_places

_FINGERPRINT = "nnscaler_integration.submodule"
_SET_HERE = ("instance_name", "load_module", "module_fn")


def parallelize_submodules(
    model: nn.Module,
    marked: Marked = None,
    *,
    dummy_forward_args: Mapping[str, Any] | None = None,
    pas_policy: Any = None,
    compute_config: Any = None,
    gen_savedir: str | Path = "./.nnscaler",
    reuse: Any = "match",
    name: str | None = None,
    **options: Any,
) -> nn.Module:
    """Replace every marked submodule of a model by its parallelized module, and return the model.

    Every rank calls it with the same model. Each submodule gets an instance name from its qualified name, so several
    of one class are several. A module that stands at several places is parallelized once and stands there again.

    Whatever was generated before, the parallelized modules have the weights that rank 0's model has now. Code that was
    generated from another source, structure or other plain attributes of a submodule does not match.

    Args:
        model: a model in one process; it must not be parallelized itself, nor what is in a marked submodule.
        marked: qualified names and classes of submodules, or one; None for those that :func:`mark` marked.
        dummy_forward_args: as for ``nnscaler.parallelize``, for the submodules that were marked without.
        pas_policy: the same.
        compute_config: the same. Not ``use_end2end``, which nnScaler knows for whole models only.
        gen_savedir: as for ``nnscaler.parallelize``, for all submodules.
        reuse: the same.
        name: what the instance names begin with; the name of the model's class if not given. Two models of one class
            that are cut in different ways need two.
        options: further arguments of ``nnscaler.parallelize``, for all submodules.

    Raises:
        ValueError: what is marked cannot be parallelized one by one; the message says what and why. Nothing was done.
        RuntimeError: the integration is not installed, or nnScaler failed; the message names the submodule. The model
            keeps its modules then.

    Example, on every rank::

        nnscaler_integration.install()
        model = Model()
        for layer in model.layers:
            nnscaler_integration.mark(layer, dummy_forward_args={"x": torch.randn(8, 64)})
        nnscaler_integration.parallelize_submodules(
            model, pas_policy="tp", compute_config=nnscaler.ComputeConfig(2, 2)
        )
        optimizer = nnscaler.build_optimizer(model, torch.optim.Adam)
    """
    if not status().installed:
        raise RuntimeError("nnscaler_integration.install() comes first")
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed.init_process_group() comes first: every rank loads its own part")
    given = sorted(set(options).intersection(_SET_HERE))
    if given:
        raise ValueError(f"{', '.join(given)}: parallelize_submodules sets that itself")
    common = {"dummy_forward_args": dummy_forward_args, "pas_policy": pas_policy, "compute_config": compute_config}
    tasks = [
        _Task.of(item, common, options, Path(gen_savedir), reuse, name or type(model).__name__)
        for item in select(model, marked)
    ]
    ties = tied_places(model)
    made = [task.run() for task in tasks]
    for task, module in zip(tasks, made, strict=True):
        for place in task.selected.places:
            above, _, last = place.rpartition(".")
            setattr(model.get_submodule(above), last, module)
    # Only ties of what was parallelized: the rest of the model is saved as ever.
    own = {place for task in tasks for place in task.selected.places}
    keep_once(model, {place: first for place, first in ties.items() if place in own})
    return model


@dataclass(frozen=True)
class _Task:
    """One call of ``nnscaler.parallelize``."""

    selected: Selected
    instance_name: str
    dummy_forward_args: dict[str, Any]
    pas_policy: Any
    compute_config: Any
    gen_savedir: Path
    reuse: Any
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        selected: Selected,
        common: Mapping[str, Any],
        options: Mapping[str, Any],
        gen_savedir: Path,
        reuse: Any,
        model_name: str,
    ) -> _Task:
        from nnscaler.runtime.module import CubeModule

        module, place = selected.module, selected.place
        if any(isinstance(inner, CubeModule) for inner in module.modules()):
            raise ValueError(f"{place} is parallelized already, or has a part that is")
        found: dict[str, Any] = {}
        for key, value in common.items():
            own = getattr(selected.mark, key)
            found[key] = value if own is None else own
            if found[key] is None:
                raise ValueError(f"{place} has no {key}: give it to mark() or to parallelize_submodules()")
        arguments, policy, config = dict(found["dummy_forward_args"]), found["pas_policy"], found["compute_config"]
        unknown = sorted(set(arguments).difference(inspect.signature(module.forward).parameters))
        if unknown:
            raise ValueError(f"{place}: {type(module).__qualname__}.forward takes no {', '.join(unknown)}")
        if config.use_end2end:
            raise ValueError(f"{place}: use_end2end is for whole models, and {place} is a part of one")
        user_config = {**config.user_config, _FINGERPRINT: fingerprint(module, arguments, policy)}
        return cls(
            selected,
            instance_name(model_name, place),
            arguments,
            policy,
            replace(config, user_config=user_config),
            gen_savedir,
            reuse,
            {**options, **selected.mark.options},
        )

    def run(self) -> Any:
        """Generate, load, and give the result rank 0's weights."""
        try:
            with _same_random_numbers():
                return self._run()
        except Exception as error:
            known = error.__cause__ or ("rank 0 raises the reason" if dist.get_rank() else None)
            reason = f"{error} ({known})" if known else f"{error}"
            raise RuntimeError(f"parallelizing {self.selected.place} failed: {reason}") from error

    def _run(self) -> Any:
        before = self._traced()
        self._parallelize(self.reuse, {**self.options, "load_module": False})
        tensors = self._newer_weights(traced_now=before != self._traced())
        options = dict(self.options)
        builds = bool(options.get("build_module_buckets", True))
        if tensors is not None and self._knows("build_module_buckets"):
            options["build_module_buckets"] = False  # what is sharded is sharded when it has its values
        if tensors is None:
            return self._parallelize("match", options)
        with importlib.import_module("nnscaler_integration.collisions").weights_follow():
            module = self._parallelize("match", options)
        weights.fill(module, tensors)
        if builds and self._knows("build_module_buckets"):
            module.build_buckets()
        return module

    def _parallelize(self, reuse: Any, options: Mapping[str, Any]) -> Any:
        return _parallel().parallelize(
            self.selected.module,
            self.dummy_forward_args,
            self.pas_policy,
            self.compute_config,
            gen_savedir=self.gen_savedir,
            instance_name=self.instance_name,
            reuse=reuse,
            **options,
        )

    def _knows(self, option: str) -> bool:
        return option in inspect.signature(_parallel().parallelize).parameters

    def _folder(self) -> Path:
        namespace_and_folder = _parallel()._prepare_namespace(
            self.gen_savedir, type(self.selected.module), self.instance_name
        )
        return Path(namespace_and_folder[1])

    def _traced(self) -> list[int]:
        """When rank 0 traced the module: with the weights that it had then."""
        files = weights.stored_files(self._folder()) if dist.get_rank() == 0 else []
        return [path.stat().st_mtime_ns for path in files]

    def _newer_weights(self, traced_now: bool) -> dict[str, torch.Tensor] | None:
        """Rank 0's tensors by name, on every rank, where what was stored before differs from them."""
        if not self.options.get("init_module_params", True):
            return None
        found: dict[str, torch.Tensor] | str | None = None
        if dist.get_rank() == 0 and not traced_now:
            try:
                found = self._compared()
            except Exception as error:
                found = f"{self._folder()} cannot be compared: {error}"
        received: Any = objcomm.broadcast_object(found, 0, device="cpu")
        if isinstance(received, str):
            raise RuntimeError(received)
        return None if received is None else dict(received)

    def _compared(self) -> dict[str, torch.Tensor] | None:
        module, folder = self.selected.module, self._folder()
        names = set().union(*weights.stored_names(folder).values())
        found = weights.tensors_of(module, sorted(names))
        unknown = sorted(names.difference(found))
        if unknown:
            raise RuntimeError(
                f"it holds values of an earlier run for which {type(module).__qualname__} has no names ({unknown[0]}); "
                f"generate again, with reuse='override'"
            )
        return found if weights.differing(folder, module) else None


def _parallel() -> Any:
    return importlib.import_module("nnscaler.parallel")


def _same_random_numbers() -> AbstractContextManager[Any]:
    """Only rank 0 traces the model, and what it draws meanwhile the others do not."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    manager: AbstractContextManager[Any] = torch.random.fork_rng(devices=devices)
    return manager
