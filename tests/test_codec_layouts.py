"""Tensors that are more than strided memory: sparse, nested, quantized, meta, subclasses; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from objcomm.codec import encode, registry
from objcomm.errors import DecodeError, EncodeError, TrustError
from tests.loopback import loopback
from tests.same import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|MaskedTensors|beta|quantized).*:UserWarning")


class Sub(torch.Tensor):
    """A subclass that is memory and attributes."""


class Slotted(torch.Tensor):
    __slots__ = ("extra",)


class Stateful(torch.Tensor):
    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, restored=True)


class Reducing(torch.Tensor):
    """A subclass that says itself how it is copied."""

    number: int
    tag: int

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Reducing._make, (self.as_subclass(torch.Tensor), 5), {"tag": 7}

    @staticmethod
    def _make(data: torch.Tensor, number: int) -> Reducing:
        made = data.as_subclass(Reducing)
        made.number = number
        return made


class Wrapper(torch.Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor, name: str) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, first.size(), dtype=first.dtype, requires_grad=first.requires_grad)

    def __init__(self, first: torch.Tensor, second: torch.Tensor, name: str) -> None:
        self.first, self.second, self.name_ = first, second, name

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], {"name": self.name_}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(inner["first"], inner["second"], context["name"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].first, args[0].second, args[0].name_)
        raise NotImplementedError(func)


class Opaque(torch.Tensor):
    """A subclass that nobody can take apart."""

    @staticmethod
    def __new__(cls) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def _with(tensor: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def _complex() -> torch.Tensor:
    return torch.randn(4, dtype=torch.complex64)


def _nested(**more: Any) -> Any:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], **more)


def _jagged(**more: Any) -> Any:
    return _nested(layout=torch.jagged, **more)


def _coo(**more: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 0]]), [1.0, 2.0, 3.0], (2, 3), **more)


def _per_channel(dtype: torch.dtype, scales: torch.dtype, zero_points: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(
        torch.randn(3, 6), torch.rand(3, dtype=scales), torch.arange(3, dtype=zero_points), 0, dtype
    )


def _lengths() -> Any:
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1])
    return torch.nested.narrow(torch.randn(3, 5, 2), 1, starts, lengths, layout=torch.jagged)


_ONES = torch.ones(3)

KINDS: dict[str, Callable[[], Any]] = {
    "conjugate": lambda: _complex().conj(),
    "conjugate of a view": lambda: _complex()[1:3].conj(),
    "negative": lambda: torch._neg_view(torch.randn(3)),
    "imaginary part of a conjugate": lambda: _complex().conj().imag,
    "both bits": lambda: torch._neg_view(_complex().conj()),
    "conjugate that requires grad": lambda: _complex().requires_grad_().conj(),
    "zero": lambda: torch._efficientzerotensor(3),
    "attributes": lambda: _with(torch.ones(2), tag={"a": (1, 2)}, other=torch.ones(3)),
    "attributes of a parameter": lambda: _with(torch.nn.Parameter(torch.ones(3)), tensor_parallel=True),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3), persistent=False),
    "attribute that is the tensor's own memory": lambda: _with(_ONES, part=_ONES.detach()[1:]),
    "meta": lambda: torch.empty(3, 4, device="meta").t(),
    "huge meta": lambda: torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.int8),
    "meta parameter": lambda: torch.nn.Parameter(torch.empty(3, device="meta")),
    "meta that requires grad": lambda: torch.empty(3, device="meta", requires_grad=True),
    "quint8": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8),
    "qint8, transposed": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8).t(),
    "qint32, a part": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint32)[1:],
    "quantized by channel": lambda: _per_channel(torch.qint8, torch.float64, torch.int64),
    "quantized by channel, float": lambda: _per_channel(torch.quint8, torch.float32, torch.float32),
    "four bits": lambda: _per_channel(torch.quint4x2, torch.float32, torch.float32),
    "sparse": _coo,
    "coalesced": lambda: _coo().coalesce(),
    "sparse that requires grad": lambda: _coo(requires_grad=True),
    "sparse and dense": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.randn(2, 5), (4, 5)),
    "sparse without elements": lambda: torch.sparse_coo_tensor(torch.zeros(2, 0).long(), torch.zeros(0, 3), (2, 3, 3)),
    "sparse parameter": lambda: torch.nn.Parameter(_coo()),
    "sparse with attributes": lambda: _with(_coo(), tag=1),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "csr that requires grad": lambda: torch.eye(4).to_sparse_csr().requires_grad_(),
    "nested": _nested,
    "nested, transposed": lambda: _nested().transpose(1, 2),
    "nested that requires grad": lambda: _nested(requires_grad=True),
    "jagged": _jagged,
    "jagged, transposed": lambda: _jagged().transpose(1, 2),
    "jagged that requires grad": lambda: _jagged(requires_grad=True),
    "jagged with lengths": _lengths,
    "subclass": lambda: torch.ones(3).as_subclass(Sub),
    "subclass with attributes": lambda: _with(torch.ones(3).as_subclass(Sub), tag=[1]),
    "subclass that requires grad": lambda: torch.ones(3, requires_grad=True).as_subclass(Sub).detach().requires_grad_(),
    "parameter of a subclass": lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Sub)),
    "subclass with slots": lambda: _with(torch.ones(3).as_subclass(Slotted), extra=3, more=4),
    "conjugate of a subclass": lambda: _complex().conj().as_subclass(Sub),
    "wrapper": lambda: Wrapper(torch.ones(2), torch.zeros(3), "w"),
    "wrapper with attributes": lambda: _with(Wrapper(torch.ones(2), torch.zeros(3), "w"), tag=1),
    "parameter of a wrapper": lambda: torch.nn.Parameter(Wrapper(torch.ones(2), torch.zeros(3), "w")),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("inference", [False, True])
def test_every_kind_of_tensor_arrives_as_it_was(name: str, inference: bool) -> None:
    sent = KINDS[name]()
    twice = [sent, {"again": sent}]
    with torch.inference_mode(inference):
        received, again = loopback(twice)
    assert again["again"] is received
    assert_same(sent, received)
    assert not received.is_inference()


@pytest.mark.parametrize("name", [each for each in KINDS if not any(word in each for word in ("subclass", "wrapper"))])
def test_restricted_trust_takes_torchs_own(name: str) -> None:
    sent = KINDS[name]()
    assert_same(sent, loopback(sent, trust="restricted"))


@pytest.mark.parametrize("name", [each for each in KINDS if "subclass" in each or "wrapper" in each])
def test_restricted_trust_refuses_classes_of_others(name: str) -> None:
    with pytest.raises(TrustError):
        encode(KINDS[name](), trust="restricted")


def test_conjugates_share_the_memory_of_what_they_are_conjugates_of() -> None:
    x = _complex()
    sent = [x, x.conj(), x.conj()[1:], x.imag]
    received = loopback(sent)
    assert_same(sent, received)
    received[0].fill_(1 + 2j)
    assert received[1].tolist() == [1 - 2j] * 4 and received[3].tolist() == [2] * 4


def test_jagged_tensors_with_the_same_offsets_still_fit_together() -> None:
    one = _jagged()
    a, b = loopback([one, one * 2])
    assert_same(list((a + b).unbind()), list((one * 3).unbind()))


def test_a_nested_tensor_of_none() -> None:
    received = loopback(torch.nested.nested_tensor([], dtype=torch.float64))
    assert received.is_nested and received.size(0) == 0 and received.dtype is torch.float64


def test_mkldnn_and_masked() -> None:
    tensor = torch.randn(3, 4)
    received = loopback(tensor.to_mkldnn())
    assert received.layout is torch._mkldnn  # type: ignore[attr-defined]
    assert_same(tensor, received.to_dense())
    masked = torch.masked.masked_tensor(tensor, tensor > 0)
    received = loopback(masked)
    assert type(received) is type(masked)
    assert_same([masked.get_data(), masked.get_mask()], [received.get_data(), received.get_mask()])


def test_classes_that_copy_themselves() -> None:
    received = loopback(torch.ones(3).as_subclass(Reducing))
    assert type(received) is Reducing and (received.number, received.tag) == (5, 7)
    received = loopback(_with(torch.ones(3).as_subclass(Stateful), tag=1))
    assert (received.tag, received.restored) == (1, True)


def test_a_local_subclass() -> None:
    class Local(torch.Tensor):
        pass

    received = loopback({"x": torch.ones(3).as_subclass(Local)})["x"]
    assert type(received).__qualname__ == Local.__qualname__ and received.tolist() == [1, 1, 1]


def test_parameters_without_memory() -> None:
    make: Any = torch.nn.UninitializedParameter
    received = loopback(make(requires_grad=False, dtype=torch.float64))
    assert type(received) is torch.nn.UninitializedParameter
    assert (received.dtype, received.requires_grad) == (torch.float64, False)
    assert type(loopback(torch.nn.UninitializedBuffer())) is torch.nn.UninitializedBuffer
    lazy: Any = loopback(torch.nn.LazyLinear(4))
    assert lazy(torch.ones(2, 3)).shape == (2, 4)


def test_a_storage_keeps_its_tensors() -> None:
    tensor = torch.arange(6)
    storage, whole, part = loopback([tensor.untyped_storage(), tensor, tensor[2:]])
    assert type(storage) is torch.UntypedStorage and storage.nbytes() == 48
    assert storage.data_ptr() == whole.data_ptr() == part.data_ptr() - 16
    assert list(loopback(torch.arange(3, dtype=torch.uint8).untyped_storage())) == [0, 1, 2]


def test_tensors_inside_of_pickled_objects() -> None:
    lambda_, tensor = loopback([lambda: sparse, sparse := _coo()])
    assert lambda_() is tensor


# -- refused ---------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fake": (lambda: FakeTensorMode().from_tensor(torch.ones(3)), "no data"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "belongs to a trace"),
    "opaque": (Opaque, "__tensor_flatten__"),
    "quantized by four bits, a part": (
        lambda: torch._empty_affine_quantized([3, 6], scale=1.0, zero_point=0, dtype=torch.quint4x2)[1:],
        "contiguous clone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_refused_with_the_reason(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(EncodeError, match=text) as caught:
        encode({"a": [1, make()]})
    assert caught.value.path == "obj['a'][1]"


def test_distributed_tensors_are_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        for each in (tensor, torch.nn.Parameter(tensor)):
            with pytest.raises(EncodeError, match=r"DTensor cannot be sent.*to_local"):
                encode([each])
        assert_same(torch.ones(4), loopback(tensor.to_local()))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_tensors_of_a_transform_are_refused(transform: Any) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(EncodeError, match=r"torch\.func"):
            encode(x)
        return x.sum()

    transform(inside)(torch.ones(3))


# -- parts from anywhere ---------------------------------------------------------------------------------------------

_ROWS, _STEPS = torch.tensor([[2, 3]]), torch.tensor([[3, 1]])
_INDEX = torch.tensor([[0, 5]])

MALFORMED: dict[str, tuple[str, list[Any]]] = {
    "no tensor": ("parameter", [3, True]),
    "no bool": ("parameter", [torch.ones(3), 1]),
    "grad of integers": ("parameter", [torch.arange(3), True]),
    "attributes that are none": ("attributes", [torch.ones(3), [1]]),
    "attributes without names": ("attributes", [torch.ones(3), {1: 2}]),
    "conjugate without a tensor": ("bits", [None, True, False, False]),
    "meta of a negative size": ("meta", [torch.float32, [-1], [1], False]),
    "indices out of bounds": ("sparse_coo", [_INDEX, torch.ones(2), [3], False, False]),
    "indices that are no tensor": ("sparse_coo", [[[0]], torch.ones(1), [3], False, False]),
    "not coalesced": ("sparse_coo", [torch.tensor([[1, 0]]), torch.ones(2), [3], True, False]),
    "csr out of bounds": (
        "sparse_compressed",
        [torch.sparse_csr, torch.tensor([0, 1]), torch.tensor([9]), torch.ones(1), [1, 3], False],
    ),
    "a layout that is none": (
        "sparse_compressed",
        [torch.strided, torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), [1, 3], False],
    ),
    "nested beyond its values": ("nested", [torch.ones(5), _ROWS, _STEPS, torch.tensor([0]), False]),
    "nested from before its values": (
        "nested",
        [torch.ones(9), _ROWS, _STEPS, torch.tensor([-1]), False],
    ),
    "nested with floats": ("nested", [torch.ones(9), _ROWS.float(), _STEPS, torch.tensor([0]), False]),
    "nested with too few offsets": (
        "nested",
        [torch.ones(9), _ROWS, _STEPS, torch.tensor([0, 1]), False],
    ),
    "jagged beyond its values": ("jagged", [torch.ones(3, 2), torch.tensor([0, 9]), None, None, None, 1, False]),
    "jagged backwards": ("jagged", [torch.ones(3, 2), torch.tensor([0, 2, 1]), None, None, None, 1, False]),
    "jagged lengths": ("jagged", [torch.ones(3, 2), torch.tensor([0, 1]), torch.tensor([5]), None, None, 1, False]),
    "jagged in no dimension": ("jagged", [torch.ones(3, 2), torch.tensor([0, 1]), None, None, None, 7, False]),
    "quantized out of its memory": ("quantized", [torch.ones(3, dtype=torch.uint8), torch.quint8, [4], 1.0, 0]),
    "quantized of another dtype": ("quantized", [torch.ones(3), torch.quint8, [3], 1.0, 0]),
    "quantized to what is none": ("quantized", [torch.ones(3, dtype=torch.uint8), torch.float32, [3], 1.0, 0]),
    "quantized along no axis": (
        "quantized",
        [torch.ones(3, dtype=torch.uint8), torch.quint8, [3], torch.ones(3), torch.ones(3).long(), 4],
    ),
    "four bits of another size": ("quantized", [torch.ones(99, dtype=torch.uint8), torch.quint4x2, [3], 1.0, 0]),
    "a storage of floats": ("storage", [torch.ones(3)]),
    "refused": ("refused", [torch.ones(3)]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_parts_are_refused(name: str) -> None:
    kind, parts = MALFORMED[name]
    entry = registry.named(f"tensor.{kind}")
    assert entry is not None
    with pytest.raises((ValueError, RuntimeError, TypeError, DecodeError)):
        entry.rebuild(parts)
