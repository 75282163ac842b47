"""``torch.export.ExportedProgram``: its program as torch.export saves it, its tensors as those of any object.

torch.export pickles example inputs and writes each tied parameter once more; tensors taken out of it beforehand keep
both promises. They are put back when the program has been loaded.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

from ..errors import DecodeError
from . import registry
from .ordinary import Ordinary


def _flatten(obj: Any) -> list[Any]:
    with Ordinary():
        bare = copy.copy(obj)
        bare._state_dict = {name: _hollow(tensor) for name, tensor in obj.state_dict.items()}
        constants = {name: value for name, value in obj.constants.items() if _is_tensor(value)}
        bare._constants = {**obj.constants, **{name: _hollow(value) for name, value in constants.items()}}
        bare._example_inputs = None
        file = io.BytesIO()
        torch.export.save(bare, file)
    state = dict(obj.state_dict)
    return [file.getvalue(), state, constants, obj.example_inputs, _signature(obj)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its data."""
    hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(hollow, requires_grad=tensor.requires_grad)
    return hollow.requires_grad_(tensor.requires_grad)


def _signature(obj: Any) -> list[str]:
    """What comes in and goes out, in order."""
    signature = obj.graph_signature
    return [f"{spec.kind.name} {spec.target}" for spec in (*signature.input_specs, *signature.output_specs)]


def _rebuild(parts: list[Any]) -> Any:
    data, state, constants, example_inputs, signature = parts
    with Ordinary():
        obj: Any = torch.export.load(io.BytesIO(data))
    if _signature(obj) != signature:
        raise DecodeError("an exported program is not loaded with the inputs and outputs that were sent")
    for mine, sent in ((obj.state_dict, state), (obj.constants, constants)):
        if not sent.keys() <= mine.keys():
            raise DecodeError("an exported program is loaded without some of its tensors")
    obj._state_dict = state
    obj._constants = {**obj.constants, **constants}
    obj._example_inputs = example_inputs
    return obj


registry.register("export.program", lambda obj: True, _flatten, _rebuild, code=True, base=torch.export.ExportedProgram)
