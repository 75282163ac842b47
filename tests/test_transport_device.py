"""Memory on accelerators: which way it goes, through which copies, and how often the host waits.

No GPU is needed: the device is written in Python, and so is its backend.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from objcomm.deadline import Deadline
from objcomm.errors import ObjcommError, TransferTimeout
from objcomm.transport import Link, accelerators, communicators, init_control, link, resolve
from tests.ranks import run_ranks


def filled(nbytes: int, value: int, device: str = "cpu") -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8).to(device)


def values(tensors: list[torch.Tensor]) -> list[set[int]]:
    return [set(torch.empty(t.numel(), dtype=torch.uint8).copy_(t).tolist()) for t in tensors]


def start(streams: bool, mixed: bool = False) -> None:
    """Install the device; with ``mixed``, let the gloo group have a strict backend for it as well."""
    import tests.strict_backend  # noqa: F401
    from tests import python_device

    python_device.install(streams=streams)
    if mixed:
        # Torch itself makes no mixed group with a backend that is written in Python.
        group: Any = dist.group.WORLD
        dist.distributed_c10d._world.pg_backend_config[group] = "cpu:gloo,pydev:strict"


def link_to(rank: int) -> Link:
    peer = resolve(None, rank, None, "peer")
    return link(peer.group, peer.group_rank)


@pytest.mark.parametrize("backend", ["mixed", "pydev:strict", "gloo"])
@pytest.mark.parametrize("streams", [False, True])
def test_from_any_device_to_any_device(backend: str, streams: bool) -> None:
    def rank_main(rank: int) -> None:
        from objcomm.transport import base

        start(streams, backend == "mixed")
        base.MAX_MESSAGE_BYTES = 700  # the larger ones go in pieces
        there = link_to(1 - rank)
        assert there.exact == (backend == "pydev:strict")
        sizes = [1000, 300, 2000, 0, 64]
        on_device = [True, False, True, True, False]
        wanted_on_device = [True, True, False, False, False]
        deadline = Deadline(20)
        for n in range(2):
            head = filled(there.window, n)
            tensors = [
                filled(size, 10 * n + i, "pydev" if accelerator else "cpu")
                for i, (size, accelerator) in enumerate(zip(sizes, on_device, strict=True))
            ]
            if rank == 0:
                sent = [there.send_head(head), there.send_segments(tensors)]
                for pending in sent:
                    pending.wait(deadline)
                    pending.wait(deadline)
                continue
            got = filled(there.window, 9)
            there.recv_head(got).wait(deadline)
            assert torch.equal(got, head)
            memory = [
                there.allocate(size, accelerator, torch.device("pydev" if wanted else "cpu"))
                for size, accelerator, wanted in zip(sizes, on_device, wanted_on_device, strict=True)
            ]
            assert [t.device.type == "pydev" for t in memory] == wanted_on_device
            received = there.recv_segments(memory, on_device)
            received.wait(deadline)
            received.wait(deadline)
            assert values(memory) == [{10 * n}, {10 * n + 1}, {10 * n + 2}, set(), {10 * n + 4}]

    run_ranks(rank_main, backend="gloo" if backend == "mixed" else backend)


def test_the_device_lane_opens_when_the_first_device_segment_crosses() -> None:
    def rank_main(rank: int) -> None:
        start(streams=True, mixed=True)
        opened = []
        original = communicators.open_communicator

        def open_communicator(backend: str, *args: Any) -> Any:
            opened.append(backend)
            return original(backend, *args)

        vars(communicators)["open_communicator"] = open_communicator
        there = link_to(1 - rank)
        for device, expected in (
            ("cpu", []),
            ("pydev", ["strict", "strict"]),
            ("pydev", ["strict", "strict"]),
        ):
            if rank == 0:
                there.send_head(filled(10, 1)).wait(Deadline(20))
                there.send_segments([filled(100, 2, device)]).wait(Deadline(20))
            else:
                there.recv_head(filled(there.window, 1)).wait(Deadline(20))
                accelerator = device != "cpu"
                memory = there.allocate(100, accelerator, None)
                assert memory.device.type == device
                there.recv_segments([memory], [accelerator]).wait(Deadline(20))
                assert values([memory]) == [{2}]
            assert opened == expected

    run_ranks(rank_main)


def test_how_often_the_host_waits_for_the_device() -> None:
    def rank_main(rank: int) -> None:
        from tests.python_device import Waits

        start(streams=True, mixed=True)
        there = link_to(1 - rank)
        deadline = Deadline(20)

        def move(device: str, wanted: str, count: int = 5) -> int:
            """Move some segments, and return how often this rank's host has waited for its device."""
            tensors = [filled(1000, n, device) for n in range(count)]
            memory = [there.allocate(1000, device != "cpu", torch.device(wanted)) for _ in range(count)]
            Waits.take()
            if rank == 0:
                there.send_segments(tensors).wait(deadline)
            else:
                there.recv_segments(memory, [device != "cpu"] * count).wait(deadline)
            counts = Waits.take()
            dist.barrier()
            return counts

        move("pydev", "pydev")  # opens the connection, which waits
        assert move("pydev", "pydev") == 0
        assert move("cpu", "cpu") == 0
        # Once for the peer, once for the copies.
        assert move("pydev", "cpu") == (0 if rank == 0 else 2)
        assert move("cpu", "pydev") == 0

    run_ranks(rank_main)


def test_how_often_the_host_waits_where_gloo_is_all_there_is() -> None:
    def rank_main(rank: int) -> None:
        from tests.python_device import Waits

        start(streams=True)
        there = link_to(1 - rank)
        Waits.take()
        if rank == 0:
            there.send_segments([filled(1000, n, "pydev") for n in range(5)]).wait(Deadline(20))
            assert Waits.take() == 1
        else:
            memory = [there.allocate(1000, True, None) for _ in range(5)]
            assert {t.device.type for t in memory} == {"pydev"}
            there.recv_segments(memory, [True] * 5).wait(Deadline(20))
            assert values(memory) == [{n} for n in range(5)]
            assert Waits.take() == 0

    run_ranks(rank_main)


def test_heads_on_a_device_are_waited_for_by_the_host() -> None:
    def rank_main(rank: int) -> None:
        from tests.python_device import Waits

        start(streams=True)
        there = link_to(1 - rank)
        for n in range(2):
            head = filled(there.window, n)
            Waits.take()
            if rank == 0:
                there.send_head(head).wait(Deadline(20))
            else:
                there.recv_head(head).wait(Deadline(20))
            waits = Waits.take()
            if n:  # the first one opens the connection
                assert waits == 1

    run_ranks(rank_main, backend="pydev:strict")


def test_a_head_on_a_device_times_out() -> None:
    """The device never finishes: what the host sees of a peer that does not come."""

    def rank_main(rank: int) -> None:
        from tests.python_device import _ModuleWithStreams

        start(streams=True)
        there = link_to(1 - rank)
        head = filled(there.window, 1)
        (there.send_head(head) if rank == 0 else there.recv_head(head)).wait(Deadline(20))
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(_ModuleWithStreams.Event, "query", lambda self: False)
        pending = there.send_head(head) if rank == 0 else there.recv_head(head)
        began = time.monotonic()
        with pytest.raises(TransferTimeout, match=r"did not come within 0\.5 s"):
            pending.wait(Deadline(0.5))
        with pytest.raises(ObjcommError):
            pending.wait(Deadline(20))
        with pytest.raises(ObjcommError, match="closed since"):
            there.send_segments([head])
        assert time.monotonic() - began < 5

    run_ranks(rank_main, backend="pydev:strict")


def test_control_takes_the_heads_and_the_cpu_off_the_device() -> None:
    def rank_main(rank: int) -> None:
        from tests.python_device import Waits

        start(streams=True)
        init_control()
        there = link_to(1 - rank)
        assert (there.exact, there.window, there.can_say_goodbye) == (False, 64 << 10, True)
        Waits.take()
        if rank == 0:
            there.send_head(filled(10, 1)).wait(Deadline(20))
            there.send_segments([filled(100, 2)]).wait(Deadline(20))
            assert Waits.take() == 0
            there.send_segments([filled(100, 3, "pydev"), filled(100, 4)]).wait(Deadline(20))
        else:
            there.recv_head(filled(there.window, 0)).wait(Deadline(20))
            there.recv_segments([filled(100, 0)], [False]).wait(Deadline(20))
            assert Waits.take() == 0
            memory = [there.allocate(100, True, None), there.allocate(100, False, None)]
            there.recv_segments(memory, [True, False]).wait(Deadline(20))
            assert values(memory) == [{3}, {4}]

    run_ranks(rank_main, backend="pydev:strict")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_real_devices(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")

    def rank_main(rank: int) -> None:
        torch.cuda.set_device(rank)
        there = link_to(1 - rank)
        deadline = Deadline(60)
        sizes, on_device = [1 << 20, 300, 5 << 20], [True, False, True]
        for n in range(3):
            kinds = ["cuda" if accelerator else "cpu" for accelerator in on_device]
            tensors = [filled(size, 10 * rank + n, kind) for size, kind in zip(sizes, kinds, strict=True)]
            sent = [there.send_head(filled(there.window, n)), there.send_segments(tensors)]
            head = filled(there.window, 9)
            there.recv_head(head).wait(deadline)
            memory = [there.allocate(s, on, None) for s, on in zip(sizes, on_device, strict=True)]
            assert [str(t.device) for t in memory] == [f"cuda:{rank}", "cpu", f"cuda:{rank}"]
            there.recv_segments(memory, on_device).wait(deadline)
            for pending in sent:
                pending.wait(deadline)
            assert (head == n).all()
            assert values(memory) == [{10 * (1 - rank) + n}] * 3

    run_ranks(rank_main, backend=backend, timeout=120)


def test_where_a_rank_receives() -> None:
    bound = torch.device("cuda", 3)
    assert accelerators.receiving("cuda", bound) == bound
    assert accelerators.receiving("mps", bound) == torch.device("mps", 0)
    assert accelerators.receiving("mps", None) == torch.device("mps", 0)


def test_how_an_nccl_communicator_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class ProcessGroupNCCL:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((store, rank, size, options, self))

        def _set_sequence_number_for_group(self) -> None:
            made.append("numbered")

    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    assert communicators.can_open("nccl")
    store = dist.HashStore()
    communicator = communicators.open_communicator("nccl", store, "a name", 1, (4, 7), 9.0)
    inner, rank, size, options, self_ = made[0]
    assert (rank, size, self_, made[1]) == (1, 2, communicator, "numbered")
    assert (options.group_name, options.global_ranks_in_group) == ("a name", [4, 7])
    assert options._timeout.total_seconds() == 9
    inner.set("key", "1")
    assert store.check(["a name/key"])


class RecordingBackend:
    """Stands for a backend object in C++, and writes down what is called."""

    def __init__(self, batches: bool) -> None:
        self.supports_coalescing = batches
        self.calls: list[Any] = []
        self.failing = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        self.calls.append(("send", [t.numel() for t in tensors], peer, tag))
        if self.failing:
            raise RuntimeError("no such peer")
        return f"work {len(self.calls)}"

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        self.calls.append(("recv", [t.numel() for t in tensors], peer, tag))
        return f"work {len(self.calls)}"

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> str:
        self.calls.append("end")
        return "work of the batch"


def test_a_message_is_one_batch_where_there_are_batches() -> None:
    tensors = [filled(n, 0) for n in (3, 4)]
    backend = RecordingBackend(batches=True)
    assert communicators.post(backend, tensors, sending=True, peer=1) == ["work of the batch"]
    assert backend.calls == ["start", ("send", [3], 1, 0), ("send", [4], 1, 0), "end"]
    # A single one too, since the other end may have it in a larger batch.
    backend.calls.clear()
    assert communicators.post(backend, tensors[:1], sending=False, peer=0) == ["work of the batch"]
    assert backend.calls == ["start", ("recv", [3], 0, 0), "end"]
    backend.calls.clear()
    backend.failing = True
    with pytest.raises(RuntimeError, match="no such peer"):
        communicators.post(backend, tensors, sending=True, peer=1)
    assert backend.calls == ["start", ("send", [3], 1, 0), "end"]


def test_a_message_is_posted_in_order_where_there_are_no_batches() -> None:
    backend = RecordingBackend(batches=False)
    works = communicators.post(backend, [filled(n, 0) for n in (3, 4)], sending=True, peer=1)
    assert works == ["work 1", "work 2"]
    assert backend.calls == [("send", [3], 1, 0), ("send", [4], 1, 0)]
