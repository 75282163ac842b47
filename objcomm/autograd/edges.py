"""Where the gradient of a tensor that was sent goes: the point of the sender's graph at which the tensor left."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..errors import ProtocolError, UsageError

_LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


class Edge:
    """The end of a graph at a tensor, as it is now: what happens to the tensor later, in place, does not move it.

    The tensor itself is let go; what is run backward is a token in its place.
    """

    __slots__ = ("_device", "_dtype", "_gradient", "_grad_fn", "_ragged", "_shape", "_token")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._gradient: list[torch.Tensor | None] = [None]
        # Jagged tensors have the same ragged size only if they have the very same offsets.
        self._ragged: Any = tensor.detach() if tensor.layout is torch.jagged else None
        self._shape = None if tensor.is_nested else tensor.shape
        self._grad_fn: Any = None
        if tensor.is_nested and self._ragged is None:
            # No function of one's own takes it, so this tensor stays, and must stay as it is.
            self._token, self._grad_fn = tensor, tensor.grad_fn
        else:
            device = "cpu" if tensor.device.type == "meta" else tensor.device
            # A node runs on the stream on which it was made, and waits for what its caller did before.
            self._token = _depart(self._gradient, tensor, device)

    def root(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What to run backward, and with which gradient, so that the gradient of the tensor is ``gradient``.

        Raises:
            ProtocolError: it cannot be the gradient of that tensor.
            UsageError: the tensor was changed in place, and is of a kind for which that matters.
        """
        if self._ragged is not None and gradient.layout is torch.jagged:
            gradient = _with_rows_of(self._ragged, gradient)
        elif self._shape is None:
            if not gradient.is_nested:
                raise ProtocolError("a dense gradient came back for a nested tensor")
        elif gradient.is_nested or gradient.shape != self._shape:
            got = "a nested tensor" if gradient.is_nested else list(gradient.shape)
            raise ProtocolError(f"a gradient of shape {got} came back for a tensor of shape {list(self._shape)}")
        if gradient.is_complex() != self._dtype.is_complex:
            raise ProtocolError(f"a gradient of {gradient.dtype} came back for a tensor of {self._dtype}")
        if gradient.is_meta and self._device.type != "meta":
            raise ProtocolError("a gradient without data came back")
        if gradient.dtype != self._dtype or gradient.device != self._device:
            gradient = gradient.to(self._device, self._dtype)
        if self._ragged is None and self._shape is None:
            if self._token.grad_fn is not self._grad_fn:
                raise UsageError("a nested tensor was changed in place after it was sent", hint="send a clone of it")
            return self._token, gradient
        self._gradient[0] = gradient
        return self._token, self._token.detach()

    def clear(self) -> None:
        self._gradient[0] = None


class _Departure(torch.autograd.Function):
    """From a tensor to a token without elements, whose gradient becomes what came back for the tensor."""

    @staticmethod
    def forward(ctx: Any, gradient: list[torch.Tensor | None], tensor: torch.Tensor, device: Any) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.empty(0, dtype=torch.float32, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        # Nobody else holds it, so that a parameter's gradient may become this very memory.
        gradient, ctx.gradient[0] = ctx.gradient[0], None
        return None, gradient, None


_depart: Any = _Departure.apply


def _with_rows_of(own: Any, gradient: Any) -> Any:
    """A jagged gradient with the offsets of the tensor that it belongs to."""
    values, rows = gradient._values, own._values
    if values.shape != rows.shape or gradient._ragged_idx != own._ragged_idx:
        raise ProtocolError(
            f"a jagged gradient with values of shape {list(values.shape)} came back for one of {list(rows.shape)}"
        )
    return torch.nested.nested_tensor_from_jagged(values, own._offsets, own._lengths, jagged_dim=own._ragged_idx)


def edges_of(tensors: dict[int, torch.Tensor]) -> dict[int, Edge]:
    """The edges of tensors, by the same numbers, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        return {number: Edge(tensor) for number, tensor in tensors.items() if not _is_lazy(tensor)}


def _is_lazy(tensor: torch.Tensor) -> bool:
    """A parameter without a shape is part of no graph."""
    return isinstance(tensor, _LAZY)
