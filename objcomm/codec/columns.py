"""Plain tensors looked at together, one attribute of all of them at a time: torch is asked from C, not from a loop."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..errors import EncodeError
from . import alike, tensors
from .form import Form, longest
from .kept import Kept

_attributes = attrgetter("__dict__")
_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
_requires_grad = attrgetter("requires_grad")
_stride = torch.Tensor.stride
_offset = torch.Tensor.storage_offset
_data_ptr = torch.Tensor.data_ptr
_storage = torch.Tensor.untyped_storage
_nbytes = torch.UntypedStorage.nbytes

# Numbers of the sets of dispatch keys that plain tensors on the CPU were seen to have.
_cpu_keys: set[Any] = set()
_forms: Kept[Hashable, Form] = Kept(4096)


class Columns(NamedTuple):
    """Tensors in columns.

    Attributes:
        forms: of each its form.
        lows: of each the address of its lowest byte.
        devices: of each that is not on the CPU its device, by place.
    """

    forms: list[Form]
    lows: list[int]
    devices: dict[int, torch.device]


def columns_of(found: list[torch.Tensor]) -> Columns | None:
    """What the tensors look like, each of a type of torch's own; ``None`` if one of them is not plain.

    Raises:
        EncodeError: there is no memory behind one of them, or its dtype cannot be sent.
    """
    if any(map(_attributes, found)):
        return None
    pattern = alike.known(found)
    if pattern is not None:
        return Columns(pattern.forms, _lows(found, pattern.forms, pattern.longest), {})
    devices: dict[int, torch.device] = {}
    keys = set(map(tensors.number_of, map(tensors.dispatch_keys, found)))
    if not keys <= _cpu_keys:
        if not all(map(tensors.is_plain, found)):
            return None
        devices = {place: tensor.device for place, tensor in enumerate(found) if tensors.on_accelerator(tensor.device)}
        if not devices:
            _cpu_keys.update(keys)
    # A form depends on nothing else but whether the tensor is on the CPU.
    looks: Any = zip(
        map(_dtype, found),
        map(_shape, found),
        map(_stride, found),
        map(_requires_grad, found),
        map(type, found),
        strict=True,
    )
    forms: list[Any] = list(map(_forms.get, looks)) if not devices else [None] * len(found)
    if None in forms:
        for place, tensor in enumerate(found):
            if forms[place] is None:
                forms[place] = _form(tensor, place in devices)
    if not devices:
        alike.remember(found, forms)
    return Columns(forms, _lows(found, forms, longest(forms)), devices)


def _lows(found: list[torch.Tensor], forms: list[Form], most: int) -> list[int]:
    """Of each tensor the address of its lowest byte; ``most`` is the longest of their hulls.

    Raises:
        EncodeError: the memory behind one of them was freed or shrunk.
    """
    lows = list(map(_data_ptr, found))
    rooms = list(map(_nbytes, map(_storage, found)))
    offsets = list(map(_offset, found))
    if any(offsets) or 0 in lows or min(rooms) < most:
        for form, low, room, offset in zip(forms, lows, rooms, offsets, strict=True):
            if (not low or room < offset * form.itemsize + form.hull) and form.hull:
                raise EncodeError(
                    f"a tensor of shape {list(form.shape)} has no memory behind it: its storage was freed or shrunk",
                    hint="send it before its storage is resized, or gather it first",
                )
    return lows


def _form(tensor: torch.Tensor, accelerator: bool) -> Form:
    look = (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, type(tensor))
    key = (look, True) if accelerator else look
    form = _forms.get(key)
    if form is None:
        form = tensors.form_of(tensor)
        _forms.keep(key, form)
    return form
