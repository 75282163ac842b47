"""Tensors that hold several others: sparse, nested, masked. They travel as their constituents.

What torch itself takes on trust (indices inside of bounds, rows inside of values) is checked when they are rebuilt.
"""

from __future__ import annotations

from typing import Any

import torch

from .composites import Kind, answers_to, boolean, requiring, tensor_part

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
    tensor = torch.sparse_coo_tensor(
        tensor_part(indices), tensor_part(values), shape, check_invariants=True, is_coalesced=boolean(coalesced)
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
    if layout not in _COMPRESSED:
        raise ValueError(f"{layout} is no layout of a compressed sparse tensor")
    tensor = torch.sparse_compressed_tensor(
        tensor_part(outer), tensor_part(inner), tensor_part(values), shape, layout=layout, check_invariants=True
    )
    return requiring(tensor, requires_grad)


# -- nested ------------------------------------------------------------------------------------------------------------


def _nested(obj: Any) -> list[Any]:
    bare = obj.detach()
    places = [bare._nested_tensor_size(), bare._nested_tensor_strides(), bare._nested_tensor_storage_offsets()]
    return [bare.values(), *places, obj.requires_grad]


def _from_nested(parts: list[Any]) -> Any:
    values, sizes, strides, offsets, requires_grad = parts
    if not tensor_part(offsets).numel():
        empty = torch.nested.nested_tensor([], dtype=tensor_part(values).dtype, device=values.device)
        return requiring(empty, requires_grad)
    if not _are_indices((sizes, 2), (strides, 2), (offsets, 1)) or strides.shape != sizes.shape:
        raise ValueError("a nested tensor with malformed sizes")
    if len(offsets) != len(sizes) or tensor_part(values).dim() != 1:
        raise ValueError("a nested tensor with malformed offsets")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        reach = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if min([offset, *size, *stride]) < 0 or (0 not in size and reach >= values.numel()):
            raise ValueError("a nested tensor reaches beyond its values")
    return requiring(_torch._nested_view_from_buffer(values, sizes, strides, offsets), requires_grad)


def _are_indices(*each: tuple[Any, int]) -> bool:
    return all(
        tensor_part(tensor).dtype is torch.int64 and tensor.dim() == dims and tensor.device.type == "cpu"
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
    if not 0 < ragged <= tensor_part(values).dim():
        raise ValueError(f"a jagged tensor of {values.dim() + 1} dimensions that is ragged in dimension {ragged}")
    _check_rows(offsets, lengths, values.shape[ragged - 1])
    inner = {"_values": values, "_offsets": offsets, "_lengths": lengths}
    inner |= {"_min_seqlen_tensor": least, "_max_seqlen_tensor": most}
    inner = {name: tensor for name, tensor in inner.items() if tensor is not None}
    unflatten: Any = NestedTensor.__tensor_unflatten__
    return unflatten(inner, {"requires_grad": boolean(requires_grad), "ragged_idx": ragged}, None, None)


def _check_rows(offsets: Any, lengths: Any, size: int) -> None:
    integers = (torch.int64, torch.int32)
    if tensor_part(offsets).dim() != 1 or offsets.dtype not in integers or not offsets.numel():
        raise ValueError("a jagged tensor with malformed offsets")
    starts = offsets[:-1]
    reach = offsets[1:] - starts if lengths is None else lengths
    if reach.dtype not in integers or reach.shape != starts.shape:
        raise ValueError("a jagged tensor with malformed lengths")
    if starts.numel() and bool(((starts < 0) | (reach < 0) | (starts + reach > size)).any()):
        raise ValueError("a jagged tensor reaches beyond its values")


# -- others ----------------------------------------------------------------------------------------------------------


def _from_dense(parts: list[Any]) -> Any:
    dense, requires_grad = parts
    return requiring(tensor_part(dense).to_mkldnn(), requires_grad)


def _from_masked(parts: list[Any]) -> Any:
    from torch.masked import MaskedTensor

    data, mask, requires_grad = parts
    make: Any = MaskedTensor
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
