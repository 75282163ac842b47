"""A module that stands at several places of a model is saved once, as an optimizer counts its parameters once.

nnScaler splits and merges the state of a model by the places of its parallelized modules, and looks at each module
once: what a second place saved would be merged from half of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


def tied_places(model: nn.Module) -> dict[str, str]:
    """The places at which a module stands that has one already, and that first place.

    >>> layer = nn.Linear(2, 2)
    >>> tied_places(nn.Sequential(layer, nn.ReLU(), layer))
    {'2': '0'}
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for place, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), place)
        if known != place and not any(place.startswith(f"{other}.") for other in found):
            found[place] = known
    return found


def with_tied(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict in which every place of a module of the model has its entries, as the original model wants them.

    Args:
        state_dict: one that names such a module once, as ``nnscaler.merge_state_dicts`` gives it.
        model: the original or the parallelized model.
    """
    return _completed(dict(state_dict), tied_places(model), "")


def keep_once(model: Any, ties: Mapping[str, str]) -> None:
    """Let the state dict of the model have the entries of such modules once, and be loaded so."""
    if ties:
        model._register_state_dict_hook(_Drop(dict(ties)))
        model._register_load_state_dict_pre_hook(_Complete(dict(ties)))


def _completed(state_dict: dict[str, Any], ties: Mapping[str, str], prefix: str) -> dict[str, Any]:
    for place, first in ties.items():
        missing = f"{prefix}{place}."
        if not any(name.startswith(missing) for name in state_dict):
            start = f"{prefix}{first}."
            same = {missing + name[len(start) :]: value for name, value in state_dict.items() if name.startswith(start)}
            state_dict.update(same)
    return state_dict


@dataclass(frozen=True)
class _Drop:
    ties: dict[str, str]

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        for name in list(state_dict):
            if any(name.startswith(f"{prefix}{place}.") for place in self.ties):
                del state_dict[name]


@dataclass(frozen=True)
class _Complete:
    ties: dict[str, str]

    def __call__(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _completed(state_dict, self.ties, prefix)
