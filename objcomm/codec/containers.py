"""Tensors that hold several others: sparse, nested, masked. They travel as their constituents.

What torch itself takes on trust (indices inside of bounds, rows inside of values) is checked when they are rebuilt.
"""

from __future__ import annotations

from typing import Any

import torch

from .allowance import spend_on
from .composites import Kind, answers_to, boolean, plain_part, requiring, sizes_part, tensor_part

_torch: Any = torch

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)


def _is_layout(obj: Any, *layouts: torch.layout) -> bool:
    return type(obj) is torch.Tensor and obj.layout in layouts and not obj.__dict__


# -- sparse ------------------------------------------------------------------------------------------------------------


def _coordinates(obj: Any) -> list[Any]:
    bare = obj.detach()
    return [bare._indices(), bare._values(), list(obj.shape), obj.is_coalesced(), obj.requires_grad]


def _from_coordinates(parts: list[Any]) -> Any:
    indices, values, shape, coalesced, requires_grad = parts
    spend_on(plain_part(indices), tensor_part(values))
    tensor = torch.sparse_coo_tensor(
        indices, values, sizes_part(shape), check_invariants=True, is_coalesced=boolean(coalesced)
    )
    return requiring(tensor, requires_grad)


def _compressed(obj: Any) -> list[Any]:
    bare = obj.detach()
    if obj.layout in _BY_ROW:
        indices = [bare.crow_indices(), bare.col_indices()]
    else:
        indices = [bare.ccol_indices(), bare.row_indices()]
    return [obj.layout, *indices, bare.values(), list(obj.shape), obj.requires_grad]


def _from_compressed(parts: list[Any]) -> Any:
    layout, outer, inner, values, shape, requires_grad = parts
    if type(layout) is not torch.layout or layout not in _COMPRESSED:
        raise ValueError("no layout of a compressed sparse tensor")
    spend_on(plain_part(outer), plain_part(inner), tensor_part(values))
    tensor = torch.sparse_compressed_tensor(
        outer, inner, values, sizes_part(shape), layout=layout, check_invariants=True
    )
    return requiring(tensor, requires_grad)


# -- nested ------------------------------------------------------------------------------------------------------------


def _nested(obj: Any) -> list[Any]:
    bare = obj.detach()
    places = [bare._nested_tensor_size(), bare._nested_tensor_strides(), bare._nested_tensor_storage_offsets()]
    return [bare.values(), *places, obj.requires_grad]


def _from_nested(parts: list[Any]) -> Any:
    values, sizes, strides, offsets, requires_grad = parts
    if not plain_part(offsets).numel():
        empty = torch.nested.nested_tensor([], dtype=tensor_part(values).dtype, device=values.device)
        return requiring(empty, requires_grad)
    if not _are_indices((sizes, 2), (strides, 2), (offsets, 1)) or strides.shape != sizes.shape:
        raise ValueError("a nested tensor with malformed sizes")
    if len(offsets) != len(sizes) or plain_part(values).dim() != 1:
        raise ValueError("a nested tensor with malformed offsets")
    spend_on(values, sizes, strides, offsets)
    # What is nested looks at the memory from its start, whatever the values show of it.
    if values.storage_offset() or not values.is_contiguous():
        values = values.clone(memory_format=torch.contiguous_format)
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        reach = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if min([offset, *size, *stride]) < 0 or (0 not in size and reach >= values.numel()):
            raise ValueError("a nested tensor reaches beyond its values")
    return requiring(_torch._nested_view_from_buffer(values, sizes, strides, offsets), requires_grad)


def _are_indices(*each: tuple[Any, int]) -> bool:
    return all(
        plain_part(tensor).dtype is torch.int64 and tensor.dim() == dims and tensor.device.type == "cpu"
        for tensor, dims in each
    )


def _is_jagged(obj: Any) -> bool:
    return obj.layout is torch.jagged and type(obj).__name__ == "NestedTensor"


def _jagged(obj: Any) -> list[Any]:
    # The offsets stay the same object: tensors that share them have the same ragged size, and can be added.
    bounds = [None if bound is None else bound.detach() for bound in (obj._min_seqlen_tensor, obj._max_seqlen_tensor)]
    return [obj._values.detach(), obj._offsets, obj._lengths, *bounds, obj._ragged_idx, obj.requires_grad]


def _from_jagged(parts: list[Any]) -> Any:
    from torch.nested._internal.nested_tensor import NestedTensor

    values, offsets, lengths, least, most, ragged, requires_grad = parts
    if type(ragged) is not int or not 0 < ragged <= tensor_part(values).dim():
        raise ValueError("a jagged tensor that is ragged in a dimension that it does not have")
    _check_rows(offsets, lengths, values.shape[ragged - 1], least, most)
    inner = {"_values": values, "_offsets": offsets, "_lengths": lengths}
    inner |= {"_min_seqlen_tensor": least, "_max_seqlen_tensor": most}
    inner = {name: tensor for name, tensor in inner.items() if tensor is not None}
    unflatten: Any = NestedTensor.__tensor_unflatten__
    return unflatten(inner, {"requires_grad": boolean(requires_grad), "ragged_idx": ragged}, None, None)


def _check_rows(offsets: Any, lengths: Any, size: int, least: Any, most: Any) -> None:
    integers = (torch.int64, torch.int32)
    if plain_part(offsets).dim() != 1 or offsets.dtype not in integers or not offsets.numel():
        raise ValueError("a jagged tensor with malformed offsets")
    spend_on(offsets)
    starts = offsets[:-1]
    # Each number by itself first: so that none of the sums overflows.
    outside = (offsets < 0) | (offsets > size)
    if lengths is not None and not bool(outside.any()):
        if plain_part(lengths).dtype not in integers or lengths.shape != starts.shape:
            raise ValueError("a jagged tensor with malformed lengths")
        outside = (lengths < 0) | (lengths > size)
    if bool(outside.any()):
        raise ValueError("a jagged tensor reaches beyond its values")
    reach = offsets[1:] - starts if lengths is None else lengths
    if starts.numel() and bool(((reach < 0) | (starts + reach > size)).any()):
        raise ValueError("a jagged tensor reaches beyond its values")
    # Kernels rely on them. Each is said by the first extent of a tensor.
    bounds = [None if bound is None else plain_part(bound).shape[0] for bound in (least, most)]
    shortest, longest = (int(reach.min()), int(reach.max())) if reach.numel() else (0, 0)
    if reach.numel() and ((bounds[0] or 0) > shortest or (bounds[1] is not None and bounds[1] < longest)):
        raise ValueError("a jagged tensor with rows that are shorter or longer than it says")


# -- others ----------------------------------------------------------------------------------------------------------


def _from_dense(parts: list[Any]) -> Any:
    dense, requires_grad = parts
    spend_on(plain_part(dense))
    return requiring(dense.to_mkldnn(), requires_grad)


def _from_masked(parts: list[Any]) -> Any:
    from torch.masked import MaskedTensor

    data, mask, requires_grad = parts
    make: Any = MaskedTensor
    spend_on(tensor_part(data), tensor_part(mask))
    return make(tensor_part(data), tensor_part(mask), boolean(requires_grad))


def _is_masked(obj: Any) -> bool:
    return type(obj).__name__ == "MaskedTensor" and type(obj).__module__.startswith("torch.masked.")


def _masked(obj: Any) -> list[Any]:
    return [obj._masked_data.detach(), obj._masked_mask.detach(), obj.requires_grad]


KINDS = (
    Kind("sparse_coo", lambda obj: _is_layout(obj, torch.sparse_coo), _coordinates, _from_coordinates),
    Kind("sparse_compressed", lambda obj: _is_layout(obj, *_COMPRESSED), _compressed, _from_compressed),
    Kind(
        "mkldnn",
        lambda obj: _is_layout(obj, _torch._mkldnn),
        lambda obj: [obj.to_dense(), obj.requires_grad],
        _from_dense,
    ),
    Kind("nested", lambda obj: answers_to(obj, r"NestedTensor\w+"), _nested, _from_nested),
    Kind("jagged", _is_jagged, _jagged, _from_jagged),
    Kind("masked", _is_masked, _masked, _from_masked),
)
