"""What users of other libraries reported, each reduced to the input that shows the fault, and what must happen here.

The names of the tests are the trackers and numbers of the public reports.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc
import os
import threading
import time
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.ranks import run_ranks
from tests.same import assert_arrived

pytestmark = pytest.mark.also_local

MIB = 1 << 20


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Colour(enum.Enum):
    RED = "r"


@dataclasses.dataclass
class Sample:
    name: str
    mask: torch.Tensor
    extra: dict[int, Any] = dataclasses.field(default_factory=dict)


def there(make: Any, check: Any = None, **kwargs: Any) -> None:
    """Send what ``make()`` gives from rank 0 to rank 1, where it must equal what ``make()`` gives there."""

    def ranks(rank: int) -> None:
        torch.manual_seed(5)
        expected = make()
        if rank == 0:
            objcomm.send_object(expected, 1)
        else:
            received = objcomm.recv_object(0, **kwargs)
            assert_arrived(received, expected)
            if check is not None:
                check(received)

    run_ranks(ranks)


def bytes_of(make: Any) -> int:
    """Bytes that crossed the transport for what ``make()`` gives."""

    def ranks(rank: int) -> int:
        before = objcomm.stats()["bytes_sent"]
        if rank == 0:
            objcomm.send_object(make(), 1)
        else:
            objcomm.recv_object(0)
        return objcomm.stats()["bytes_sent"] - before

    return int(run_ranks(ranks)[0])


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU: two of them")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_two_gpus
def test_pytorch_76865_137938_61591_accelerator_tensors_land_on_the_receivers_device() -> None:
    def ranks(rank: int) -> None:
        torch.cuda.set_device(1 - rank)
        if rank == 0:
            objcomm.send_object({"x": torch.arange(5, device="cuda:1")}, 1)
            objcomm.send_object({"x": torch.arange(5, device="cuda:1")}, 1)
        else:
            assert_arrived(objcomm.recv_object(0), {"x": torch.arange(5, device="cuda:0")})
            assert_arrived(objcomm.recv_object(0, device="cpu"), {"x": torch.arange(5)})

    run_ranks(ranks)


@pytest.mark.gpu
@needs_gpu
def test_pytorch_138842_cpu_and_accelerator_tensors_in_one_dict() -> None:
    there(
        lambda: {
            "cpu": torch.arange(5),
            "gpu": torch.arange(MIB, device="cuda"),
            "tiny": torch.ones(2, device="cuda"),
        }
    )


def test_pytorch_74602_torchrec_4601_a_subgroup_without_rank_0() -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([2, 1])
        if rank == 1:
            objcomm.send_object({"from": 1}, 2, group=group)
        elif rank == 2:
            assert objcomm.recv_object(1, group=group) == {"from": 1}

    run_ranks(ranks, 3)


def test_pytorch_67600_a_rank_outside_the_group_gets_an_error() -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            with pytest.raises(objcomm.UsageError):
                objcomm.recv_object(1, group=group)

    run_ranks(ranks, 3)


def test_deepspeed_5696_the_shape_differs_between_micro_batches_on_one_channel() -> None:
    def ranks(rank: int) -> None:
        for size in (3, 0, 700_000, 5, 1):
            if rank == 0:
                objcomm.send_object({"x": torch.full((2, size), size)}, 1, channel="adapter5")
            else:
                assert_arrived(objcomm.recv_object(0, channel="adapter5"), {"x": torch.full((2, size), size)})

    run_ranks(ranks)


def test_pytorch_62283_77554_transposed_and_results_of_linear_algebra() -> None:
    there(
        lambda: [
            torch.arange(12.0).reshape(3, 4).T,
            *torch.linalg.qr(torch.arange(9.0).reshape(3, 3) + torch.eye(3)),
        ]
    )


def test_pytorch_85234_dask_4621_a_zero_in_the_shape() -> None:
    there(
        lambda: [
            torch.empty(0, 5),
            torch.empty(3, 0, 2, dtype=torch.int8),
            np.empty((4, 0)),
            np.empty((0,), "f4"),
        ]
    )


FLOAT8 = [dtype for name, dtype in sorted(vars(torch).items()) if name.startswith("float8_")]


@pytest.mark.parametrize("shape", [(), (7,), (3, 300_000)], ids=str)
def test_ray_48141_vllm_16860_bf16_and_every_fp8_bitwise(shape: tuple[int, ...]) -> None:
    assert len(FLOAT8) >= 5

    def make() -> list[torch.Tensor]:
        size = torch.Size(shape).numel()
        noise = torch.randint(0, 256, (size,), dtype=torch.uint8)
        out = [noise.view(dtype).reshape(shape) for dtype in FLOAT8]
        return [
            *out,
            torch.randint(0, 256, (size * 2,), dtype=torch.uint8).view(torch.bfloat16).reshape(shape),
        ]

    there(make)


def test_pytorch_65604_1995_182105_a_small_view_ships_its_own_bytes_only() -> None:
    def view() -> Any:
        return torch.zeros(MIB)[5:6]

    whole, window = bytes_of(lambda: torch.zeros(MIB)), bytes_of(view)
    assert whole > 4 * MIB
    assert window < 300
    there(lambda: [torch.arange(float(MIB))[5:6], torch.arange(300.0).reshape(3, 100)[:, 7]])


def test_pytorch_145665_the_same_tensor_twice() -> None:
    def make() -> Any:
        x = torch.arange(6)
        return [x, x, x[:2], {"deep": (x,)}]

    def check(got: Any) -> None:
        assert got[0] is got[1] is got[3]["deep"][0]
        got[0][0] = 99
        assert got[2][0] == 99

    there(make, check)


def test_pytorch_30807_sparse_quantized_and_nested() -> None:
    def make() -> Any:
        dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces that it will drop them
            quantized = torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8)
        return [
            dense.to_sparse(),
            dense.to_sparse_csr(),
            quantized,
            torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged),
        ]

    there(make)


def test_pytorch_183024_an_integer_beside_a_float_that_requires_grad() -> None:
    there(lambda: {"ids": torch.arange(4), "w": torch.ones(3, requires_grad=True)})


def test_accelerate_4154_deepspeed_3029_exact_types_of_containers() -> None:
    def make() -> Any:
        default = collections.defaultdict(list, {"a": [1]})
        ordered = collections.OrderedDict([("z", 1), ("a", torch.ones(2))])
        kept = [Point(1, torch.ones(2)), Sample("s", torch.ones(1)), Colour.RED, frozenset({1, 2})]
        return [default, ordered, *kept]

    def check(got: Any) -> None:
        assert got[0]["missing"] == []
        assert got[4] is Colour.RED

    there(make, check)


def test_msgpack_python_474_keys_tuples_and_bytes_exactly() -> None:
    there(lambda: {1: (1, 2), (1, "a"): [1, 2], "s": b"s", b"b": "b", None: bytearray(b"x"), 2.5: {3}})


def test_lightning_6694_1457_17269_a_lambda_works_and_a_lock_is_named_on_both_ranks() -> None:
    def ranks(rank: int) -> None:
        scale = 3
        if rank == 0:
            objcomm.send_object({"transform": lambda x: x * scale}, 1)
            bad = {"loader": {"workers": [Sample("a", torch.ones(1), {7: threading.Lock()})]}}
            caught: Any
            with pytest.raises(objcomm.EncodeError) as caught:
                objcomm.send_object(bad, 1)
        else:
            assert objcomm.recv_object(0)["transform"](5) == 15
            with pytest.raises(objcomm.PeerError) as caught:
                objcomm.recv_object(0)
        assert caught.value.path == "obj['loader']['workers'][0].extra[7]"

    run_ranks(ranks)


def test_pipeedge_12_deepspeed_969_a_tuple_with_none_and_a_dict_between_stages() -> None:
    there(lambda: (torch.ones(2, 3), None, {"pe": torch.arange(3), "n": 3}))


def test_pytorch_82091_a_rank_that_encodes_slowly() -> None:
    def ranks(rank: int) -> None:
        if rank == 0:

            class Slow:
                def __reduce__(self) -> Any:
                    time.sleep(1.5)
                    return (int, (1,))

            with pytest.raises(objcomm.PeerError):
                objcomm.send_object(Slow(), 1)
        else:
            with pytest.raises(objcomm.TransferTimeout) as caught:
                objcomm.recv_object(0, timeout=0.5)
            for word in ("rank 1", "peer 0", "phase head"):
                assert word in str(caught.value)

    run_ranks(ranks)


def test_vllm_49274_both_ranks_send_one_mebibyte_then_receive() -> None:
    def ranks(rank: int) -> None:
        work = objcomm.isend_object(torch.full((MIB // 4,), float(rank)), 1 - rank)
        assert_arrived(objcomm.recv_object(1 - rank), torch.full((MIB // 4,), float(1 - rank)))
        work.wait()

    run_ranks(ranks)


def test_tensorrt_llm_3688_10665_fire_and_forget_in_a_loop() -> None:
    def ranks(rank: int) -> None:
        for i in range(60):
            if rank == 0:
                objcomm.isend_object({"i": i, "t": torch.full((40_000,), i), "l": [torch.full((3,), i)]}, 1)
                gc.collect()
            else:
                expected = {"i": i, "t": torch.full((40_000,), i), "l": [torch.full((3,), i)]}
                assert_arrived(objcomm.recv_object(0), expected)

    run_ranks(ranks)


def test_vllm_29565_a_pickle_that_runs_code_is_refused_in_restricted_trust() -> None:
    def ranks(rank: int) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return (os.putenv, ("OBJCOMM_TEST_RAN", "1"))

        if rank == 0:
            objcomm.send_object({"payload": Evil()}, 1)
        else:
            objcomm.configure(trust="restricted")
            ran: list[str] = []
            original = os.putenv
            os.putenv = lambda *args: ran.append("ran")
            try:
                with pytest.raises(objcomm.TrustError):
                    objcomm.recv_object(0)
            finally:
                os.putenv = original
            assert not ran

    run_ranks(ranks)


def test_sglang_38249_two_ranks_exchange_large_objects() -> None:
    def ranks(rank: int) -> None:
        mine, theirs = torch.full((5 * MIB,), rank), torch.full((5 * MIB,), 1 - rank)
        assert_arrived(objcomm.exchange_objects([mine, "x"], 1 - rank), [theirs, "x"])

    run_ranks(ranks)
