"""Dense tensors that are more than plain memory: attributes, bits, quantized, meta, and storages.

Each kind is a composite: it travels as plain tensors and what makes it of those. Parts of a message may come from
anyone, so what torch itself takes on trust is checked when a tensor is rebuilt.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import EncodeError
from . import containers, subclasses
from .address import words
from .allowance import spend, spend_on
from .composites import Kind, answers_to, boolean, plain_part, register, requiring, sizes_part, tensor_part
from .tensors import current_accelerator, on_accelerator

_C: Any = torch._C
_torch: Any = torch
_nn: Any = torch.nn

_QUANTIZED = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


# -- attributes and parameters ---------------------------------------------------------------------------------------


def _hides(name: Any) -> bool:
    """Whether an attribute would stand in front of what every tensor has."""
    return hasattr(torch.nn.Parameter, name)


def _with_attributes(obj: Any) -> list[Any]:
    hidden = next((name for name in obj.__dict__ if type(name) is str and _hides(name)), None)
    if hidden is not None:
        raise EncodeError(f"a tensor with an attribute {hidden!r} in place of torch's own cannot be sent")
    bare = obj.detach()
    if type(obj) is torch.nn.Parameter:
        bare = torch.nn.Parameter(bare, requires_grad=obj.requires_grad)
    elif obj.requires_grad:
        bare.requires_grad_()
    return [bare, dict(obj.__dict__)]


def _from_attributes(parts: list[Any]) -> Any:
    tensor, attributes = parts
    if type(attributes) is not dict or not all(type(name) is str for name in attributes):
        raise ValueError("attributes of a tensor are a dict with names")
    if type(tensor) not in _OWN or any(map(_hides, attributes)):
        raise ValueError("attributes in place of those that every tensor has")
    tensor.__dict__.update(attributes)
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
    memory, conjugate, negative, requires_grad = parts
    # It may be in the message as itself too.
    tensor = plain_part(memory).detach()
    if boolean(conjugate):
        if not tensor.is_complex():
            raise ValueError("a conjugate of numbers that are not complex")
        _C._set_conj(tensor, True)
    if boolean(negative):
        if not (tensor.is_complex() or tensor.is_floating_point()):
            raise ValueError("a negative view of numbers that are neither floating point nor complex")
        _C._set_neg(tensor, True)
    return requiring(tensor, requires_grad)


def _meta(obj: Any) -> list[Any]:
    return [obj.dtype, list(obj.shape), list(obj.stride()), obj.requires_grad]


def _from_meta(parts: list[Any]) -> Any:
    dtype, shape, strides, requires_grad = parts
    empty = torch.empty_strided(sizes_part(shape), sizes_part(strides), dtype=dtype, device="meta")
    return requiring(empty, requires_grad)


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
    plain_part(memory)
    whole = dtype in _QUANTIZED if type(dtype) is torch.dtype else False
    count = math.prod(sizes_part(shape))
    if whole:
        if memory.dtype is not _QUANTIZED[dtype] or list(memory.shape) != shape:
            raise ValueError("the memory of a quantized tensor does not fit its dtype and shape")
    elif memory.dtype is not torch.uint8 or not memory.is_contiguous() or count > 4 * memory.numel():
        raise ValueError("the memory of a quantized tensor does not fit its dtype and shape")
    if len(parameters) == 2:
        scale, zero_point = parameters
        if type(scale) is not float or type(zero_point) is not int:
            raise ValueError("a quantized tensor with a malformed scale")
        # Where the memory takes the place of what is made here, nothing of it need be made.
        empty = _torch._empty_affine_quantized(
            [0] if whole else shape, scale=scale, zero_point=zero_point, dtype=dtype, device=memory.device
        )
    else:
        scales, zero_points, axis = parameters
        if type(axis) is not int or not 0 <= axis < len(shape):
            raise ValueError("a quantized tensor without the axis of its channels")
        if not plain_part(scales).numel() == plain_part(zero_points).numel() == shape[axis]:
            raise ValueError("a quantized tensor has other channels than scales")
        spend_on(scales, zero_points)
        spend(count)
        empty = _torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=memory.device
        )
    if whole:
        return empty.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
    storage = empty.untyped_storage()
    if memory.numel() != storage.nbytes():
        raise ValueError("the memory of a quantized tensor does not fit its dtype and shape")
    spend_on(memory)
    words(storage, 0, (), storage.nbytes(), 1).copy_(memory)
    return empty


# -- others ----------------------------------------------------------------------------------------------------------


def _bytes_of(obj: torch.UntypedStorage) -> list[Any]:
    return [words(obj, 0, (), obj.nbytes(), 1)]


def _from_bytes(parts: list[Any]) -> Any:
    (memory,) = parts
    if plain_part(memory).dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError("a storage is made of bytes")
    storage, first, size = memory.untyped_storage(), memory.storage_offset(), memory.numel()
    return storage if storage.nbytes() == size else storage[first : first + size]


def _without_memory(obj: Any) -> list[Any]:
    persistent = getattr(obj, "persistent", None)
    return [type(obj) is torch.nn.UninitializedParameter, obj.dtype, obj.device, obj.requires_grad, persistent]


def _from_nothing(parts: list[Any]) -> Any:
    parameter, dtype, device, requires_grad, persistent = parts
    if type(device) is not torch.device or type(dtype) is not torch.dtype:
        raise ValueError("a parameter without memory, and without a device or a dtype")
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
        lambda parts: requiring(tensor_part(parts[0]), parts[1]),
    ),
    Kind("meta", lambda obj: answers_to(obj, "Meta"), _meta, _from_meta),
    Kind("quantized", lambda obj: answers_to(obj, r"Quantized\w+"), _quantized, _from_quantized),
    Kind("uninitialized", lambda obj: type(obj) in _EMPTY, _without_memory, _from_nothing),
    Kind("storage", lambda obj: type(obj) is torch.UntypedStorage, _bytes_of, _from_bytes, base=torch.UntypedStorage),
)

# What is registered later is asked first: those that take any subclass, or refuse any tensor, come before the others.
for _kind in (*subclasses.KINDS, *containers.KINDS, *KINDS):
    register(_kind)
