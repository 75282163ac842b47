"""A strict comparison: same types, same values to the bit, same layouts, same sharing."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import pathlib
import struct
import sys
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def assert_same(a: Any, b: Any, *, device: bool = True) -> None:
    """Assert that two objects are the same in all that a transfer promises, naming the path where they are not.

    ``device=False`` leaves aside where tensors live. Functions and classes are compared by reference or, if they were
    sent by value, by their code.
    """
    comparison = _Comparison(device)
    comparison.compare(a, b, "obj")
    comparison.compare_sharing()


def assert_arrived(received: Any, sent: Any) -> None:
    """The same, in the order in which a receiver reads it."""
    assert_same(sent, received)


class _Comparison:
    def __init__(self, device: bool) -> None:
        self._device = device
        self._partners: dict[int, int] = {}
        self._alive: list[Any] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._arrays: list[tuple[Any, Any, str]] = []

    def compare(self, a: Any, b: Any, path: str) -> None:
        assert type(a) is type(b) or _same_class(type(a), type(b)), f"{path}: {type(a)} became {type(b)}"
        if self._met(a, b, path):
            return
        np = sys.modules.get("numpy")
        if isinstance(a, torch.Tensor):
            self._compare_tensors(a, b, path)
        elif np is not None and isinstance(a, np.ndarray):
            self._compare_arrays(a, b, path)
        elif np is not None and isinstance(a, np.generic):
            assert a.dtype == b.dtype, f"{path}: {a.dtype} became {b.dtype}"
            assert np.asarray(a).dtype.char == np.asarray(b).dtype.char, path
            assert _same_bits(a, b), f"{path}: {a!r} became {b!r}"
        elif isinstance(a, float):
            assert struct.pack("d", a) == struct.pack("d", b), f"{path}: {a!r} became {b!r}"
        elif isinstance(a, complex):
            assert struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag), f"{path}: {a} became {b}"
        elif isinstance(a, type | types.FunctionType):
            self._compare_definitions(a, b, path)
        else:
            self._compare_structure(a, b, path)

    def _met(self, a: Any, b: Any, path: str) -> bool:
        """Whether this pair is being compared already. Tensors, arrays and objects of classes keep their identity."""
        known = self._partners.get(id(a))
        if known is not None:
            keeps = _keeps_identity(a)
            assert not keeps or known == id(b), f"{path}: one {type(a).__qualname__} became two"
            if known == id(b):
                return True
        if not isinstance(a, str | bytes | int | float | complex | type(None) | range | tuple | frozenset):
            self._partners[id(a)] = id(b)
            self._alive += (a, b)
        return False

    def _compare_structure(self, a: Any, b: Any, path: str) -> None:
        if isinstance(a, dict):
            assert len(a) == len(b), f"{path}: {len(a)} entries became {len(b)}"
            for index, (left, right) in enumerate(zip(a.items(), b.items(), strict=True)):
                self.compare(left[0], right[0], f"{path}.keys()[{index}]")
                self.compare(left[1], right[1], f"{path}[{_show(left[0])}]")
            if isinstance(a, defaultdict):
                self.compare(a.default_factory, b.default_factory, f"{path}.default_factory")
        elif isinstance(a, list | tuple | deque):
            assert len(a) == len(b), f"{path}: {len(a)} items became {len(b)}"
            for index, (left, right) in enumerate(zip(a, b, strict=True)):
                self.compare(left, right, f"{path}[{index}]")
            if isinstance(a, deque):
                assert a.maxlen == b.maxlen, path
        elif isinstance(a, set | frozenset):
            assert len(a) == len(b), f"{path}: {len(a)} elements became {len(b)}"
            elements = [sorted(each, key=_order) for each in (a, b)]
            for index, (left, right) in enumerate(zip(*elements, strict=True)):
                self.compare(left, right, f"{path}.element[{index}]")
        elif isinstance(a, slice):
            self.compare((a.start, a.stop, a.step), (b.start, b.stop, b.step), path)
        elif isinstance(a, functools.partial):
            self.compare((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), path)
        elif isinstance(a, types.MethodType):
            self.compare((a.__func__, a.__self__), (b.__func__, b.__self__), path)
        elif isinstance(a, BaseException):
            self.compare(a.args, b.args, f"{path}.args")
        elif isinstance(a, decimal.Decimal | pathlib.PurePath) or "__reduce__" in vars(type(a)):
            assert repr(a) == repr(b), f"{path}: {a!r} became {b!r}"
            return
        elif _has_no_equality(type(a)):
            assert a is b or _state(a), f"{path}: {a!r} became {b!r}"
        elif not _state(a):
            assert a == b or (a != a and b != b and repr(a) == repr(b)), f"{path}: {a!r} became {b!r}"
        if not isinstance(a, OrderedDict):
            mine, other = _state(a), _state(b)
            assert list(mine) == list(other), f"{path}: attributes {list(mine)} became {list(other)}"
            for name in mine:
                self.compare(mine[name], other[name], f"{path}.{name}")

    def _compare_definitions(self, a: Any, b: Any, path: str) -> None:
        if a is b:
            return
        by_value = "<locals>" in a.__qualname__ or "<lambda>" in a.__qualname__
        assert by_value, f"{path}: {a} became another {b}"
        assert a.__qualname__ == b.__qualname__, path
        if isinstance(a, types.FunctionType):
            assert a.__code__.co_code == b.__code__.co_code, path
            assert a.__code__.co_consts == b.__code__.co_consts or a.__code__.co_consts, path
            left, right = ([cell.cell_contents for cell in each.__closure__ or ()] for each in (a, b))
            self.compare(left, right, f"{path}.__closure__")

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _compare_tensors(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        assert a.layout == b.layout, f"{path}: {a.layout} became {b.layout}"
        assert a.dtype == b.dtype, f"{path}: {a.dtype} became {b.dtype}"
        assert a.is_nested == b.is_nested, path
        assert a.requires_grad == b.requires_grad, f"{path}: requires_grad {a.requires_grad} became {b.requires_grad}"
        assert not self._device or a.device.type == b.device.type, f"{path}: {a.device} became {b.device}"
        left, right = _attributes(a), _attributes(b)
        assert list(left) == list(right), f"{path}: attributes {list(left)} became {list(right)}"
        for name in left:
            self.compare(left[name], right[name], f"{path}.{name}")
        if a.is_nested:
            self._compare_parts(a, b, path, list(map(str, range(a.size(0)))), torch.Tensor.unbind)
            return
        assert a.shape == b.shape, f"{path}: {tuple(a.shape)} became {tuple(b.shape)}"
        if a.layout in _COMPRESSED:
            names = (*_COMPRESSED[a.layout], "values")
            self._compare_parts(a, b, path, names, lambda t: [getattr(t, name)() for name in names])
        elif a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), f"{path}: is_coalesced"
            self._compare_parts(a, b, path, ("_indices", "_values"), lambda t: [t._indices(), t._values()])
        elif a.is_meta:
            assert a.stride() == b.stride(), f"{path}: strides {a.stride()} became {b.stride()}"
        elif hasattr(type(a), "__tensor_flatten__") and type(a) is not torch.Tensor:
            wrapper: Any = type(a)
            names = wrapper.__tensor_flatten__(a)[0]
            assert names == wrapper.__tensor_flatten__(b)[0], path
            self._compare_parts(a, b, path, names, lambda t: [getattr(t, name) for name in names])
        else:
            self._compare_strided(a, b, path)

    def _compare_parts(self, a: Any, b: Any, path: str, names: Any, parts: Any) -> None:
        with torch.no_grad():
            left, right = list(parts(a.detach())), list(parts(b.detach()))
        for name, first, second in zip(names, left, right, strict=True):
            self.compare(first, second, f"{path}.{name}")

    def _compare_strided(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        assert a.is_conj() == b.is_conj(), f"{path}: is_conj"
        assert a.is_neg() == b.is_neg(), f"{path}: is_neg"
        _compare_strides(a, b, path)
        if a.dtype in _QUANTIZED:
            assert a.qscheme() == b.qscheme(), path
            if a.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
                assert (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point()), path
            else:
                assert a.q_per_channel_axis() == b.q_per_channel_axis(), path
                assert torch.equal(a.q_per_channel_scales(), b.q_per_channel_scales()), path
                assert torch.equal(a.q_per_channel_zero_points(), b.q_per_channel_zero_points()), path
        left, right = _bits(a), _bits(b)
        assert torch.equal(left, right.to(left.device)), f"{path}: values differ"
        if a.numel():
            self._tensors.append((a, b, path))

    def compare_sharing(self) -> None:
        """Memory that overlapped still does, at the same distance; memory that did not still does not."""
        arrays = [(_Span.of_array(a), _Span.of_array(b), path) for a, b, path in self._arrays]
        spans = [(_Span.of_tensor(a), _Span.of_tensor(b), path) for a, b, path in self._tensors] + arrays
        for index, (left, right, path) in enumerate(spans):
            for other_left, other_right, other_path in spans[:index]:
                where = f"memory of {path} and {other_path}"
                if left.meets(other_left):
                    assert right.meets(other_right), f"{where} was shared and is not any more"
                    if left.dense and other_left.dense:
                        distances = left.start - other_left.start, right.start - other_right.start
                        assert distances[0] == distances[1], f"{where}: distance {distances[0]} became {distances[1]}"
                else:
                    assert not (right.meets(other_right) and right.dense and other_right.dense), f"{where} got shared"

    # -- arrays ------------------------------------------------------------------------------------------------------

    def _compare_arrays(self, a: Any, b: Any, path: str) -> None:
        assert a.shape == b.shape, f"{path}: {a.shape} became {b.shape}"
        assert a.dtype == b.dtype, f"{path}: {a.dtype} became {b.dtype}"
        assert a.dtype.char == b.dtype.char, path
        assert a.flags.writeable == b.flags.writeable, f"{path}: writeable"
        assert a.flags.c_contiguous <= b.flags.c_contiguous, f"{path}: not C-contiguous any more"
        assert a.flags.f_contiguous <= b.flags.f_contiguous, f"{path}: not Fortran-contiguous any more"
        if a.dtype.hasobject:
            self.compare(a.ravel().tolist(), b.ravel().tolist(), path)
            return
        if hasattr(a, "mask"):
            self.compare(a.data, b.data, f"{path}.data")
            self.compare(a.mask, b.mask, f"{path}.mask")
            return
        assert _same_bits(a, b), f"{path}: values differ"
        if a.size and a.dtype.itemsize:
            self._arrays.append((a, b, path))


class _Span:
    """The bytes that a tensor or an array lies in."""

    def __init__(self, start: int, stop: int, dense: bool, device: str) -> None:
        self.start, self.stop, self.dense, self.device = start, stop, dense, device

    @classmethod
    def of_tensor(cls, t: torch.Tensor) -> _Span:
        extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        dense = t.numel() == extent
        return cls(t.data_ptr(), t.data_ptr() + extent * t.element_size(), dense, str(t.device))

    @classmethod
    def of_array(cls, a: Any) -> _Span:
        start = a.__array_interface__["data"][0]
        steps = [(size - 1) * stride for size, stride in zip(a.shape, a.strides, strict=True)]
        stop = start + sum(step for step in steps if step > 0) + a.itemsize
        start += sum(step for step in steps if step < 0)
        return cls(start, stop, stop - start == a.nbytes, "cpu")

    def meets(self, other: _Span) -> bool:
        return self.device == other.device and self.start < other.stop and other.start < self.stop


def _compare_strides(a: torch.Tensor, b: torch.Tensor, path: str) -> None:
    """Gaps between elements vanish on the way; the order of dimensions, and expanded dimensions, stay."""
    left, right = (
        [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1] if t.numel() else []
        for t in (a, b)
    )
    if _Span.of_tensor(a).dense:
        assert left == right, f"{path}: strides {a.stride()} became {b.stride()}"
        return
    for index, (first, second) in enumerate(zip(left, right, strict=True)):
        assert (first == 0) == (second == 0), f"{path}: strides {a.stride()} became {b.stride()}"
        for earlier in range(index):
            if left[earlier] and first:
                assert (left[earlier] > first) == (right[earlier] > second) or left[earlier] == first, (
                    f"{path}: the order of dimensions changed: {a.stride()} became {b.stride()}"
                )


def _bits(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    if t.is_conj():
        t = t.conj()
    if t.is_neg():
        t = torch._neg_view(t)
    if t.dtype in _QUANTIZED:
        return t.int_repr()
    if t.dtype is torch.complex128:
        t = torch.view_as_real(t)
    if t.numel() == 0:
        return torch.empty(t.shape, dtype=torch.uint8)
    t = t.as_subclass(torch.Tensor)
    return t.view(_INTEGERS[t.element_size()])


def _same_bits(a: Any, b: Any) -> bool:
    """The padding of records and of long doubles is nobody's business."""
    import numpy as np

    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "gGfc" and a.dtype.itemsize in (16, 32) and a.dtype.char in "gG":
        same = (a == b) | ((a != a) & (b != b))
        return bool(np.all(same))
    if a.dtype.names is not None:
        return all(_same_bits(a[name], b[name]) for name in a.dtype.names)
    return bool(a.tobytes() == b.tobytes())


def _attributes(t: torch.Tensor) -> dict[str, Any]:
    return dict(t.__dict__) if type(t).__module__.partition(".")[0] != "torch" or type(t) is torch.Tensor else {}


def _state(obj: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for base in type(obj).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and base.__flags__ & (1 << 9) and hasattr(obj, name):
                state[name] = getattr(obj, name)
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(obj, type | types.ModuleType):
        state.update(attributes)
    return state


def _order(item: Any) -> tuple[Any, ...]:
    """A key to sort elements of sets by that does not depend on the order of the sets inside of them."""
    if isinstance(item, frozenset):
        return (type(item).__name__, str(sorted(map(_order, item))))
    if isinstance(item, tuple):
        return (type(item).__name__, str([_order(each) for each in item]))
    if dataclasses.is_dataclass(item):
        return (type(item).__name__, str([_order(value) for value in _state(item).values()]))
    return (type(item).__name__, repr(item))


def _keeps_identity(obj: Any) -> bool:
    """Tensors, arrays and objects of classes do; a plain container that occurs twice arrives as two."""
    if isinstance(obj, torch.Tensor) or dataclasses.is_dataclass(obj):
        return True
    np = sys.modules.get("numpy")
    if np is not None and isinstance(obj, np.ndarray):
        return True
    return hasattr(obj, "__dict__") and not isinstance(obj, dict | tuple | list | set | types.FunctionType | type)


def _has_no_equality(cls: Any) -> bool:
    return cls.__eq__ is object.__eq__


def _same_class(a: type, b: type) -> bool:
    return "<locals>" in a.__qualname__ and (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


def _show(key: Any) -> str:
    text = repr(key)
    return text if len(text) < 60 else text[:57] + "..."
