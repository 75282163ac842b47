"""How a generated module is copied, pickled and sent: as its state and the identity of its code.

What comes out runs where the original would: on the same rank of a group of the same size. There the module is made
anew, so that it has its own reducers, and gets the state. Elsewhere, and without a process group, it is rebuilt to be
looked at, saved, merged and sent on, and refuses to run: its code talks to other ranks as the one it was generated for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import foreign, loading
from .foreign import Refusal

# Handles of communication, tables of parameters that the constructor fills, and hooks that it registers.
_MADE = (
    "_reducers",
    "_param_reducer_map",
    "_nreplicas2localparams",
    "_backward_prefetched_params",
    "_forward_prefetched_params",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
# What a user may have changed since; everything else that the constructor sets follows from the code.
_CHANGED = ("training", "_non_presistent_buffers_inited", "_is_full_backward_hook")
_HOOKS = ("_forward_", "_backward_")


@dataclass(frozen=True)
class Origin:
    """Which code a module is an instance of, and for whom it was generated.

    Attributes:
        code: the generated file as it was when it was loaded.
        rank: for which it was generated.
        world_size: of the plan, all replicas together.
        original: module, name and qualified name of the class that was parallelized.
    """

    code: loading.Code
    rank: int
    world_size: int
    original: tuple[str, str, str]

    def __str__(self) -> str:
        return f"rank {self.rank}'s part of {self.original[0]}.{self.original[2]}"


def adopt(cls: Any, original: type | None, names: tuple[str, str, str]) -> None:
    """Make a loaded class one that can be referred to, and its instances ones that can be copied, pickled and sent."""
    if original is not None:
        cls.__orig_module_class__ = original
    cls.__name__ = names[1]
    cls._original = names
    cls.__reduce_ex__ = _reduce
    cls.__setstate__ = _set_state
    loading.give_reference(cls)


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    from nnscaler.runtime.adapter.reducer import Reducer

    cls = type(module)
    code = loading.code_of(sys.modules[cls.__module__])
    origin = Origin(code, int(cls.rank), int(module.compute_config.runtime_ngpus), cls._original)
    state = {
        name: value
        for name, value in vars(module).items()
        if name not in _MADE and not isinstance(value, (Reducer, Refusal))
    }
    return rebuild, (origin,), state


def rebuild(origin: Origin) -> Any:
    """An instance that has no state yet, which :func:`_set_state` gives it.

    Raises:
        RuntimeError: the code is not here, or other code is loaded under its name; the message names the files.
    """
    cls = _class_of(origin)
    refusal = _refusal(origin)
    if refusal is None:
        return cls(False)
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    module._reducers = []
    module._nreplicas2localparams = None
    module._backward_prefetched_params, module._forward_prefetched_params = {}, set()
    module._register_state_dict_hook(cls._post_state_dict_hook)
    module._register_load_state_dict_pre_hook(cls._pre_load_state_dict_hook, with_module=True)
    foreign.refuse_to_run(module, refusal)
    return module


def _refusal(origin: Origin) -> str | None:
    """Why an instance must not run here; None where it may."""
    if not dist.is_initialized():
        here = "there is no process group"
    elif (dist.get_rank(), dist.get_world_size()) == (origin.rank, origin.world_size):
        return None
    else:
        here = foreign.this_rank()
    return foreign.refusal(f"{origin} of {origin.world_size}", here)


def _set_state(module: Any, state: dict[str, Any]) -> None:
    if isinstance(vars(module).get("forward"), Refusal):
        # The folder of the code that was found here, not that of the sender.
        vars(module).update({name: value for name, value in state.items() if name != "module_dir"})
        module.module_dir = Path(loading.code_of(sys.modules[type(module).__module__]).path).parent
        return
    own = vars(module)
    for kind in ("_parameters", "_buffers"):
        _copy_tensors(module, own[kind], state[kind])
    for name, value in state.items():
        if name not in own or name in _CHANGED or name.startswith(_HOOKS):
            own[name] = value


@torch.no_grad()
def _copy_tensors(module: Any, own: dict[str, Any], sent: dict[str, Any]) -> None:
    if own.keys() != sent.keys():
        raise RuntimeError(f"{type(module).__name__} has {sorted(own)}, the state is of {sorted(sent)}")
    for name, value in sent.items():
        mine = own[name]
        if mine.shape != value.shape or (mine.dtype != value.dtype and module.reducers):
            raise RuntimeError(
                f"{type(module).__name__}.{name} is {mine.dtype} {tuple(mine.shape)}, the state's is {value.dtype} "
                f"{tuple(value.shape)}"
            )
        if mine.dtype == value.dtype:
            mine.copy_(value)
        else:
            mine.data = value.data
        if isinstance(mine, torch.nn.Parameter):
            mine.requires_grad_(value.requires_grad)


def _class_of(origin: Origin) -> Any:
    """The class of that very code: loaded, or in a file here."""
    from .state import find_nnscaler

    nnscaler = find_nnscaler()
    if isinstance(nnscaler, str):
        raise RuntimeError(f"{origin} cannot be rebuilt: {nnscaler}")
    name, wanted = origin.code.name, origin.code
    module = sys.modules.get(name)
    if module is not None:
        loaded = loading.code_of(module)
        if loaded.digest != wanted.digest:
            raise RuntimeError(f"{origin} is made of {wanted}, but {loaded}, other code, is loaded as {name} here")
    else:
        module = loading.load(name, _find(origin))
    cls: Any = getattr(module, loading.CLASS)
    if getattr(cls, "_original", None) is None:
        cls.runtime_version = getattr(module, "runtime_version", None)
        for step in ("_train_step", "_infer_step"):
            setattr(cls, step, getattr(module, step, getattr(cls, step)))
        adopt(cls, _resolve(origin.original), origin.original)
    return cls


def _find(origin: Origin) -> Path:
    """The file with the code: where the sender has it, or on the import path."""
    wanted = origin.code
    paths = [Path(wanted.path)]
    try:
        spec = importlib.util.find_spec(wanted.name)
    except ImportError:
        spec = None
    if spec is not None and spec.origin:
        paths.append(Path(spec.origin))
    for path in paths:
        if path.is_file() and loading.read(wanted.name, path)[0].digest == wanted.digest:
            _make_importable(wanted.name, path)
            return path
    seen = [f"{path} ({'other code' if path.is_file() else 'not there'})" for path in dict.fromkeys(paths)]
    raise RuntimeError(f"{origin} is made of {wanted}, which is not here; looked at {', '.join(seen)}")


def _make_importable(name: str, path: Path) -> None:
    """The packages above the module are found through the folder that nnScaler was told to generate into."""
    folder = str(path.resolve().parents[name.count(".")])
    if folder not in sys.path:
        sys.path.append(folder)


def _resolve(names: tuple[str, str, str]) -> type | None:
    """The original class, where it can be found by its name."""
    try:
        found: Any = importlib.import_module(names[0])
        for part in names[2].split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) else None
