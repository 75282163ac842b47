"""Plain tensors: which ones travel as they are, and how they are made again over memory that has arrived."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..errors import DecodeError, EncodeError
from . import dtypes
from .form import ACCELERATOR, PARAMETER, REQUIRES_GRAD, Form
from .kept import Kept

_C: Any = torch._C
dispatch_keys = _C._dispatch_keys
number_of: Callable[[Any], Any] = getattr(_C.DispatchKeySet, "raw_repr", repr)

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

# What a tensor answers to if it is nothing but strided memory of a device. Conjugate, negative, quantized, nested,
# meta and wrapped tensors answer to more, or to something else.
_BACKEND = re.compile(r"CPU|CUDA|XPU|MPS|HPU|MTIA|IPU|PrivateUse1")
_COMMON = re.compile(r"ADInplaceOrView|Autograd\w+|Autocast\w+")
_plain_keys: dict[Any, bool] = {}
_CPU = torch.device("cpu")


def is_plain(obj: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else, of a type of torch's own: ``add_tensor`` takes it."""
    if type(obj) not in PLAIN_TYPES or obj.__dict__:
        return False
    keys = dispatch_keys(obj)
    known = _plain_keys.get(number_of(keys))
    return _look_up(keys) if known is None else known


def dispatch_names(obj: torch.Tensor) -> list[str]:
    """What a tensor answers to, beside autograd and autocast."""
    return _names(dispatch_keys(obj))


def _names(keys: Any) -> list[str]:
    return [name for name in re.findall(r"\w+", str(keys))[1:] if not _COMMON.fullmatch(name)]


def _look_up(keys: Any) -> bool:
    others = _names(keys)
    plain = len(others) == 1 and is_memory(others[0])
    _plain_keys[number_of(keys)] = plain
    return plain


def is_memory(name: str) -> bool:
    """Whether a tensor that answers to nothing else is memory of a device."""
    return _BACKEND.fullmatch(name) is not None


def on_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def domain_of(tensor: torch.Tensor) -> Hashable:
    """Where addresses tell which tensors overlap: the whole CPU, but only one storage of an accelerator.

    What an accelerator calls a data pointer need not be an address.
    """
    if not on_accelerator(tensor.device):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()


def current_accelerator() -> torch.device:
    """Where a tensor from an accelerator goes if nothing says where; the CPU if there is no accelerator here."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None:
        if not accelerator.is_available():
            return torch.device("cpu")
        return torch.device(accelerator.current_accelerator().type, accelerator.current_device_index())
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def form_of(obj: torch.Tensor) -> Form:
    """The form of a plain tensor.

    Raises:
        EncodeError: its dtype is none that can be sent, or it is too large to be described.
    """
    dtype = obj.dtype
    code = dtypes.CODES.get(dtype)
    if code is None:
        raise EncodeError(f"tensors of {dtype} cannot be sent", hint="send them viewed as another dtype")
    flags = REQUIRES_GRAD if obj.requires_grad else 0
    if type(obj) is not torch.Tensor:
        flags |= PARAMETER
    if on_accelerator(obj.device):
        flags |= ACCELERATOR
    itemsize = dtype.itemsize
    try:
        return Form(code, dtype, itemsize, obj.shape, [stride * itemsize for stride in obj.stride()], flags)
    except ValueError as error:
        raise EncodeError(f"a tensor cannot be sent: {error}") from None


_read: Kept[Hashable, Form] = Kept(4096)


def read_before(code: int, flags: int, shape: list[int]) -> Form | None:
    """What :func:`read_form` made of the same numbers, in row-major order, for an earlier message."""
    return _read.get((dtypes.BY_CODE.get(code), flags, *shape))


def read_form(code: Any, flags: int, shape: Sequence[int], strides: Sequence[int] | None) -> Form:
    """The form of a tensor as it came in a message, every number in it checked.

    Raises:
        DecodeError: no tensor here can have it.
    """
    dtype = dtypes.BY_CODE.get(code)
    if dtype is None:
        raise DecodeError(f"this torch ({torch.__version__}) has no {dtypes.name_of(code)}")
    if flags & ~(REQUIRES_GRAD | PARAMETER | ACCELERATOR):
        raise DecodeError(f"a tensor with the flags {flags}")
    if flags & REQUIRES_GRAD and not (dtype.is_floating_point or dtype.is_complex):
        raise DecodeError(f"a tensor of {dtype} cannot require grad")
    itemsize = dtype.itemsize
    if strides is not None and any(stride < 0 or stride % itemsize for stride in strides):
        raise DecodeError(f"a tensor of {dtype} cannot have strides of {list(strides)} bytes")
    form = Form(code, dtype, itemsize, shape, strides, flags)
    if strides is None:
        _read.keep((dtype, flags, *shape), form)
    return form


def over(form: Form, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A tensor over memory, ``offset`` bytes into it. It is no view of another tensor for autograd."""
    tensor = torch.empty(0, dtype=form.dtype, device=storage.device)
    return tensor.set_(storage, offset // form.itemsize, form.shape, form.steps)


def memory_of(obj: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of any class, as a plain tensor."""
    plain = torch.empty(0, dtype=obj.dtype, device=obj.device)
    storage = obj.untyped_storage()
    return plain.set_(storage, obj.storage_offset(), obj.size(), obj.stride())


def base_of(forms: list[Form], storage: torch.UntypedStorage) -> torch.Tensor:
    """A flat tensor over memory, for :func:`view` of several tensors: of a dtype that can have gradients if one can."""
    dtypes_ = [form.dtype for form in forms]
    dtype = next((each for each in dtypes_ if each.is_floating_point or each.is_complex), dtypes_[0])
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def view(form: Form, base: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor over memory, ``offset`` bytes into that of ``base``. It is a view of it as autograd knows them."""
    itemsize = form.itemsize
    strides = [stride // itemsize for stride in form.strides]
    with torch.enable_grad():
        if base.dtype is not form.dtype:
            # Any part will do, as long as both dtypes divide it.
            common = max(itemsize, base.element_size())
            base = base[: common // base.element_size()].view(form.dtype)
        return base.as_strided(form.shape, strides, offset // itemsize)


def finished(form: Form, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with what its flags say."""
    flags = form.flags
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor
