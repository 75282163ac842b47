"""Dense tensors that are more than plain memory: attributes, bits, quantized, meta, and storages.

Each kind is a composite: it travels as plain tensors and what makes it of those. Parts of a message may come from
anyone, so what torch itself takes on trust is checked when a tensor is rebuilt.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import EncodeError
from . import containers, subclasses
from .address import words
from .composites import Kind, answers_to, boolean, register, requiring, tensor_part
from .tensors import current_accelerator, on_accelerator

_C: Any = torch._C
_torch: Any = torch
_nn: Any = torch.nn

_QUANTIZED = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


# -- attributes and parameters ---------------------------------------------------------------------------------------


def _with_attributes(obj: Any) -> list[Any]:
    bare = obj.detach()
    if type(obj) is torch.nn.Parameter:
        bare = torch.nn.Parameter(bare, requires_grad=obj.requires_grad)
    elif obj.requires_grad:
        bare.requires_grad_()
    return [bare, dict(obj.__dict__)]


def _from_attributes(parts: list[Any]) -> Any:
    tensor, attributes = parts
    if not isinstance(attributes, dict) or not all(type(name) is str for name in attributes):
        raise ValueError("attributes of a tensor are a dict with names")
    tensor_part(tensor).__dict__.update(attributes)
    return tensor


def _from_parameter(parts: list[Any]) -> Any:
    tensor, requires_grad = parts
    return torch.nn.Parameter(tensor_part(tensor), requires_grad=boolean(requires_grad))


# -- bits, zeros, meta -----------------------------------------------------------------------------------------------


def _without_bits(obj: Any) -> list[Any]:
    conjugate, negative = obj.is_conj(), obj.is_neg()
    memory = obj.detach()
    memory = memory.conj() if conjugate else memory
    memory = _torch._neg_view(memory) if negative else memory
    return [memory, conjugate, negative, obj.requires_grad]


def _from_bits(parts: list[Any]) -> Any:
    tensor, conjugate, negative, requires_grad = parts
    if boolean(conjugate):
        _C._set_conj(tensor_part(tensor), True)
    if boolean(negative):
        _C._set_neg(tensor_part(tensor), True)
    return requiring(tensor, requires_grad)


def _meta(obj: Any) -> list[Any]:
    return [obj.dtype, list(obj.shape), list(obj.stride()), obj.requires_grad]


def _from_meta(parts: list[Any]) -> Any:
    dtype, shape, strides, requires_grad = parts
    return requiring(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), requires_grad)


# -- quantized -------------------------------------------------------------------------------------------------------


def _quantized(obj: Any) -> list[Any]:
    scheme = obj.qscheme()
    if scheme in _PER_TENSOR:
        parameters: list[Any] = [obj.q_scale(), obj.q_zero_point()]
    else:
        parameters = [obj.q_per_channel_scales(), obj.q_per_channel_zero_points(), obj.q_per_channel_axis()]
    storage = obj.untyped_storage()
    plain = _QUANTIZED.get(obj.dtype)
    if plain is not None:
        memory = torch.empty(0, dtype=plain, device=obj.device)
        memory.set_(storage, obj.storage_offset(), obj.shape, obj.stride())
    elif obj.is_contiguous() and obj.storage_offset() == 0:
        memory = words(storage, 0, (), storage.nbytes(), 1)
    else:
        raise EncodeError(f"a view of a tensor of {obj.dtype} cannot be sent", hint="send a contiguous clone of it")
    return [memory, obj.dtype, list(obj.shape), *parameters]


def _from_quantized(parts: list[Any]) -> Any:
    memory, dtype, shape, *parameters = parts
    device = tensor_part(memory).device
    if len(parameters) == 2:
        scale, zero_point = parameters
        empty = _torch._empty_affine_quantized(shape, scale=scale, zero_point=zero_point, dtype=dtype, device=device)
    else:
        scales, zero_points, axis = parameters
        if not 0 <= axis < len(shape) or not scales.numel() == zero_points.numel() == shape[axis]:
            raise ValueError("a quantized tensor has other channels than scales")
        empty = _torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device
        )
    if dtype in _QUANTIZED:
        if memory.dtype is not _QUANTIZED[dtype] or list(memory.shape) != shape:
            raise ValueError("the memory of a quantized tensor does not fit its dtype and shape")
        return empty.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
    storage = empty.untyped_storage()
    if memory.dtype is not torch.uint8 or memory.numel() != storage.nbytes():
        raise ValueError("the memory of a quantized tensor does not fit its dtype and shape")
    words(storage, 0, (), storage.nbytes(), 1).copy_(memory)
    return empty


# -- others ----------------------------------------------------------------------------------------------------------


def _bytes_of(obj: torch.UntypedStorage) -> list[Any]:
    return [words(obj, 0, (), obj.nbytes(), 1)]


def _from_bytes(parts: list[Any]) -> Any:
    (memory,) = parts
    if tensor_part(memory).dtype is not torch.uint8 or memory.dim() != 1:
        raise ValueError("a storage is made of bytes")
    storage, first, size = memory.untyped_storage(), memory.storage_offset(), memory.numel()
    return storage if storage.nbytes() == size else storage[first : first + size]


def _without_memory(obj: Any) -> list[Any]:
    persistent = getattr(obj, "persistent", None)
    return [type(obj) is torch.nn.UninitializedParameter, obj.dtype, obj.device, obj.requires_grad, persistent]


def _from_nothing(parts: list[Any]) -> Any:
    parameter, dtype, device, requires_grad, persistent = parts
    if on_accelerator(device) and device.type != "meta":
        device = current_accelerator()
    if boolean(parameter):
        return _nn.UninitializedParameter(boolean(requires_grad), device, dtype)
    return _nn.UninitializedBuffer(boolean(requires_grad), device, dtype, boolean(persistent))


_OWN = (torch.Tensor, torch.nn.Parameter)
_EMPTY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)

KINDS = (
    Kind(
        "parameter",
        lambda obj: type(obj) is torch.nn.Parameter and not obj.__dict__,
        lambda obj: [obj.detach(), obj.requires_grad],
        _from_parameter,
    ),
    Kind("attributes", lambda obj: type(obj) in _OWN and bool(obj.__dict__), _with_attributes, _from_attributes),
    Kind("bits", lambda obj: answers_to(obj, "Conjugate|Negative"), _without_bits, _from_bits),
    Kind(
        "zero",
        lambda obj: answers_to(obj, "ZeroTensor"),
        lambda obj: [obj.clone(), obj.requires_grad],
        lambda parts: requiring(*parts),
    ),
    Kind("meta", lambda obj: answers_to(obj, "Meta"), _meta, _from_meta),
    Kind("quantized", lambda obj: answers_to(obj, r"Quantized\w+"), _quantized, _from_quantized),
    Kind("uninitialized", lambda obj: type(obj) in _EMPTY, _without_memory, _from_nothing),
    Kind("storage", lambda obj: type(obj) is torch.UntypedStorage, _bytes_of, _from_bytes, base=torch.UntypedStorage),
)

# What is registered later is asked first: those that take any subclass, or refuse any tensor, come before the others.
for _kind in (*subclasses.KINDS, *containers.KINDS, *KINDS):
    register(_kind)
