"""Plain tensors through the codec: every dtype, every kind of memory, and that what arrives is ordinary."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from objcomm.codec import dtypes, encode, tensors
from objcomm.errors import DecodeError, EncodeError
from tests.loopback import arrive, loopback, plan_of
from tests.memory_loop import assert_same_memory, bits, reader_of, take_apart, through
from tests.same import assert_same

_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype) and each not in _QUANTIZED}, key=str
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

# Elements of each way in which a tensor is transferred: gathered with others, a part of a block, a segment.
SIZES = [7, 3000, 1 << 18]


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any bits at all, NaNs of every kind among them."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(torch.bool)
    tensor = torch.empty(0, dtype=dtype)
    storage = torch.randint(0, 256, (max(1, count) * dtype.itemsize,), dtype=torch.uint8).untyped_storage()
    strides = torch.empty(shape, device="meta").stride()
    return tensor.set_(storage, 0, shape, strides)


# -- dtypes and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    assert dtype in dtypes.CODES
    objs = [
        _random(dtype),
        _random(dtype, 5),
        _random(dtype, 3, 4),
        _random(dtype, 0),
        _random(dtype, 2, 0, 3),
        _random(dtype, 3, 4).t(),
        _random(dtype, 9)[2:7:2],
        _random(dtype, 1).expand(4),
        _random(dtype, 100, 60),
        _random(dtype, 6)[:4],
    ]
    objs += [objs[1][1:3], objs[1]]
    for threshold in (1, 100, 1 << 19):
        received = loopback(objs, threshold=threshold)
        for one, other in zip(objs, received, strict=True):
            assert one.dtype is other.dtype and one.shape == other.shape
            assert _bytes(one) == _bytes(other)
        assert received[11] is received[1]
        assert received[10].data_ptr() == received[1].data_ptr() + dtype.itemsize


def _bytes(tensor: torch.Tensor) -> bytes:
    # Not every dtype has a kernel that makes it contiguous.
    return bits(tensors.memory_of(tensor).view(_INTEGERS[tensor.element_size()])) if tensor.numel() else b""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def test_the_numbers_of_the_dtypes_never_change() -> None:
    assert dtypes.BY_CODE[0] is torch.float32
    assert dtypes.BY_CODE[9] is torch.bool
    assert dtypes.BY_CODE[15] is torch.uint64
    assert dtypes.BY_CODE[20] is torch.float8_e8m0fnu
    assert dtypes.name_of(46) == "torch.uint7"
    assert dtypes.name_of(48) == "torch.int1"
    assert len(dtypes.BY_CODE) == len(dtypes.CODES)


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(torch.ones(2, dtype=torch.bfloat16))
    monkeypatch.delitem(dtypes.BY_CODE, 3)
    with pytest.raises(DecodeError, match=r"has no torch\.bfloat16"):
        plan_of(encoded)


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(3.5),
    "offset": lambda: torch.arange(10.0)[4:],
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    "permuted with gaps": lambda: torch.randn(2, 3, 8, 5)[:, :, ::2].permute(3, 1, 0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1, 2).expand(4, 3, 5, 2),
    "expanded to nothing": lambda: torch.randn(3, 1).expand(3, 0),
    "qr": lambda: torch.linalg.qr(torch.randn(4, 3))[0],
    "empty with odd strides": lambda: torch.empty(100).as_strided((3, 0, 2), (7, 5, 11)),
    "single with odd strides": lambda: torch.randn(100).as_strided((1, 3, 1), (77, 1, 99)),
    "single and gaps": lambda: torch.randn(10, 10)[3:4, ::3],
    "sliding": lambda: torch.randn(20).as_strided((8, 5), (1, 3)),
    "sliding, sparse": lambda: torch.randn(3000).as_strided((2, 3), (1000, 999)),
    "huge by expansion": lambda: torch.ones(1).expand(1 << 40),
    "many dimensions": lambda: torch.randn([1, 2] * 20 + [1] * 25).as_strided([1] * 60 + [3], [1] * 61),
    "pinned to a shared file": lambda: torch.randn(5).share_memory_(),
}


@pytest.mark.parametrize("name", [each for each in STRIDED if each not in ("many dimensions", "huge by expansion")])
@pytest.mark.parametrize("threshold", [1, 1 << 19])
def test_every_way_to_lie_in_memory(name: str, threshold: int) -> None:
    tensor = STRIDED[name]()
    received = loopback(tensor, threshold=threshold)
    assert_same(tensor, received)
    assert_same_memory([tensor], [received])


def test_a_tensor_that_is_only_huge_by_expansion() -> None:
    received = loopback(torch.full((1,), 3.0).expand(1 << 40, 2))
    assert received.shape == (1 << 40, 2) and received.stride() == (0, 0) and received[1 << 39, 1] == 3


def test_many_dimensions() -> None:
    tensor = torch.randn(3).view([1] * 80 + [3])
    assert_same(tensor, loopback(tensor))


def test_a_file_mapped_read_only(tmp_path: Any) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    tensor = torch.from_file(str(path), shared=False, size=200, dtype=torch.uint8)
    assert_same(tensor, loopback(tensor))


def test_identity_and_the_threshold() -> None:
    x = torch.randn(1000)
    for threshold in (4000, 4001):
        encoded = encode([x, x], threshold=threshold)
        assert len(encoded.segments) == (threshold == 4000)
        one, other = arrive(encoded)
        assert one is other
        assert_same(x, one)


# -- what arrives is ordinary ----------------------------------------------------------------------------------------


@pytest.fixture(params=["grad", "no_grad", "inference"])
def mode(request: pytest.FixtureRequest) -> Any:
    modes: dict[str, Any] = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    return modes[request.param]


@pytest.mark.parametrize("size", SIZES)
def test_what_arrives_is_ordinary_whatever_mode_the_caller_is_in(mode: Any, size: int) -> None:
    with mode():
        received = loopback([torch.ones(size), torch.ones(size), torch.ones(size).view(1, -1).t()])
    for tensor in received:
        assert type(tensor) is torch.Tensor
        assert not tensor.is_inference() and tensor._base is None and tensor.is_leaf
        version = tensor._version
        tensor.add_(1)
        assert tensor._version == version + 1
        tensor.requires_grad_()
        (tensor * tensor).sum().backward()
        assert tensor.grad is not None and torch.equal(tensor.grad, torch.full_like(tensor, 4))
        tensor.requires_grad_(False)
        assert tensor.resize_(3).shape == (3,)


@pytest.mark.parametrize("size", SIZES)
def test_changing_one_leaves_the_others_alone(size: int) -> None:
    a, b, c = loopback([torch.ones(size), torch.ones(size), torch.ones(size)])
    versions = a._version, c._version
    b.fill_(7)
    assert (a._version, c._version) == versions
    assert float(a.sum()) == float(c.sum()) == size
    starts = {each.untyped_storage().data_ptr() for each in (a, b, c)}
    assert len(starts) == 3
    for each in (a, b, c):
        assert each.untyped_storage().nbytes() == size * 4


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_that_grows_never_grows_over_its_neighbour(size: int) -> None:
    a, b = loopback([torch.ones(size), torch.full((size,), 2.0)])
    # Only a part of a larger block cannot grow, and says so.
    part = size == 3000
    with pytest.raises(RuntimeError, match="not resizable") if part else contextlib.nullcontext():
        a.resize_(2 * size).fill_(5)
    assert torch.equal(b, torch.full((size,), 2.0))


def test_views_that_share_memory_are_views_for_autograd_too() -> None:
    x = torch.ones(10)
    base, part = loopback([x, x[3:]])
    weight = torch.ones(10, requires_grad=True)
    product = weight * base
    part.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    base, part = loopback([x, x[3:]])
    base.mul_(torch.full((), 3.0, requires_grad=True))
    assert part.requires_grad and part.grad_fn is not None and float(part.detach()[0]) == 3
    numbers, floats = loopback([x.view(torch.int32), x])
    assert floats.requires_grad_().is_leaf and numbers.data_ptr() == floats.data_ptr()


def test_small_tensors_do_not_keep_the_block_that_they_came_in() -> None:
    encoded = encode([torch.ones(3), torch.ones(4), torch.ones(100_000)])
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    block = weakref.ref(inline.untyped_storage())
    received: Any = plan_of(encoded).build(inline, encoded.segments)[:2]  # type: ignore[index]
    del inline, encoded
    gc.collect()
    assert block() is None
    assert [each.tolist() for each in received] == [[1.0] * 3, [1.0] * 4]


# -- gradients -------------------------------------------------------------------------------------------------------


def test_requires_grad_is_kept_and_history_is_not() -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 2
    received = loopback({"leaf": leaf, "result": result, "number": torch.arange(3), "float": torch.ones(3)})
    assert [each.requires_grad for each in received.values()] == [True, True, False, False]
    assert all(each.is_leaf and each.grad_fn is None for each in received.values())
    received["result"].sum().backward()
    assert received["result"].grad is not None and leaf.grad is None


def test_parameters_arrive_as_parameters() -> None:
    tied = torch.nn.Parameter(torch.randn(4, 4))
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    large = torch.nn.Parameter(torch.randn(1 << 18))
    received = loopback([tied, frozen, tied, large, tied.detach()[1:]])
    assert_same([tied, frozen, tied, large, tied.detach()[1:]], received)
    assert received[0] is received[2]
    assert all(isinstance(each, torch.nn.Parameter) and each.is_leaf for each in received[:4])
    received[0].sum().backward()
    assert received[0].grad is not None


def test_a_module_and_its_tied_weights() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    module[2].weight = module[0].weight
    received = loopback(module)
    assert received[2].weight is received[0].weight
    assert_same(dict(module.state_dict()), dict(received.state_dict()))
    assert_same(module.state_dict(), loopback(module.state_dict()))


# -- what the caller has switched on ---------------------------------------------------------------------------------


class _Everything(torch.overrides.TorchFunctionMode):
    """Meddles with every function that it sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.empty, torch.zeros, torch.frombuffer, torch.split_with_sizes_copy):
            raise AssertionError(f"{func} was seen")
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "a default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake tensors": FakeTensorMode,
    "a counter": lambda: FlopCounterMode(display=False),
    "a function mode": _Everything,
    "inference": torch.inference_mode,
    "anomaly detection": torch.autograd.detect_anomaly,
    "deterministic": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_of_the_caller_do_not_reach_the_codec(name: str) -> None:
    x = torch.randn(100, requires_grad=True)
    objs: list[Any] = [torch.ones(3), torch.ones(3, dtype=torch.float16), x, x[::2], *torch.ones(9, 2, 2).unbind()]
    objs += [
        torch.randn(4, 4).t(),
        torch.ones(1 << 18),
        torch.ones(0),
        torch.nn.Parameter(torch.ones(3)),
        torch.eye(3)[:, :2],
    ]
    objs += [torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
    encoded = encode(objs)
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    segments = [segment.clone() for segment in encoded.segments]
    with MODES[name]():
        encoded = encode(objs)
        encoded.write_inline(inline)
        received = plan_of(encoded).build(inline, segments)
    assert_same(objs, received)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_tensors_made_in_inference_mode_arrive_as_ordinary_ones() -> None:
    with torch.inference_mode():
        objs = [torch.ones(3), torch.ones(3000), torch.ones(1 << 18), torch.ones(4, 4)[:, 1]]
    received = loopback(objs)
    assert not any(each.is_inference() for each in received)
    assert_same(objs, received)


def test_areas_made_in_inference_mode_hold_ordinary_tensors() -> None:
    objs = [torch.ones(3), torch.ones(3000), torch.ones(1 << 18), torch.ones(3, dtype=torch.int8), *torch.ones(9, 2)]
    memory, inline = take_apart(objs)
    with torch.inference_mode():
        inline = inline.clone()
        segments = [segment.clone() for segment in memory.segments]
    received = reader_of(memory).build(inline, segments)
    assert not any(each.is_inference() for each in received)
    assert_same_memory(objs, received)


# -- what cannot be sent ---------------------------------------------------------------------------------------------


def _freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def _shrunk() -> torch.Tensor:
    tensor = torch.ones(1000)[500:]
    tensor.untyped_storage().resize_(3999)
    return tensor


@pytest.mark.parametrize("make", [_freed, _shrunk])
def test_a_tensor_without_its_memory_is_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(EncodeError, match="freed or shrunk") as caught:
        encode({"a": [torch.ones(3), make()]})
    assert caught.value.path == "obj['a'][1]"


def test_an_empty_tensor_needs_no_memory() -> None:
    tensor = torch.empty(3, 0)
    tensor.untyped_storage().resize_(0)
    assert_same(tensor, loopback(tensor))


def test_many_small_tensors_of_many_kinds() -> None:
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16]
    shapes: list[list[int]] = [[], [3], [0], [2, 3], [1, 4, 2]]
    objs = [_random(kinds[number % 7], *shapes[number % 5]) for number in range(500)]
    assert_same_memory(objs, through(objs))
