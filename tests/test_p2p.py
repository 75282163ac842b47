"""Objects between two real ranks: what arrives, in how many messages, in which order, on every kind of backend."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import objcomm
from tests.ranks import run_ranks
from tests.same import assert_arrived
from tests.values import VALUES

pytestmark = pytest.mark.also_local

WINDOW = {"gloo": 65536, "strict": 4096, "local": 65536}
MIB = 1 << 20


def big(mebibytes: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(mebibytes * MIB // 8, dtype=torch.int64) * 31 + seed


def counted(action: Any) -> dict[str, int]:
    before = objcomm.stats()
    action()
    after = objcomm.stats()
    return {name: after[name] - before[name] for name in after}


def test_every_value_arrives_exactly(backend: str) -> None:
    def ranks(rank: int) -> None:
        for name, make in VALUES:
            torch.manual_seed(11)
            expected = make()
            if rank == 0:
                objcomm.send_object(expected, 1, channel=name)
            else:
                received = objcomm.recv_object(0, channel=name)
                try:
                    assert_arrived(received, expected)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from error

    run_ranks(ranks, backend=backend, timeout=120)


def test_every_value_also_goes_both_ways_at_once_and_by_handles(backend: str) -> None:
    def ranks(rank: int) -> None:
        torch.manual_seed(11)
        values = [(name, make()) for name, make in VALUES]
        ahead = [objcomm.irecv_object(1 - rank, channel=name) for name, _ in values]
        sent = [objcomm.isend_object(value, 1 - rank, channel=name) for name, value in values]
        for (_, value), work in zip(values, ahead, strict=True):
            assert_arrived(work.wait(), value)
        for (_, value), work in zip(values, sent, strict=True):
            assert work.wait() is value
        for _, value in values:
            assert_arrived(objcomm.exchange_objects(value, 1 - rank), value)

    run_ranks(ranks, backend=backend, timeout=120)


@pytest.mark.parametrize("window_minus", [1, 0, -1])
def test_message_counts(backend: str, window_minus: int) -> None:
    """1 for a small object, 2 for a head above the window, 1 + chunks above the threshold of a segment."""

    def ranks(rank: int) -> None:
        def move(obj: Any) -> dict[str, int]:
            return counted(lambda: objcomm.send_object(obj, 1) if rank == 0 else objcomm.recv_object(0))

        way = "sent" if rank == 0 else "received"
        window = WINDOW[backend]
        small = move({"a": 1})
        assert small[f"messages_{way}"] == 1
        assert small[f"objects_{way}"] == 1
        assert small[f"bytes_{way}"] == (window if backend == "strict" else small[f"bytes_{way}"]) <= window
        assert small["messages_received" if rank == 0 else "messages_sent"] == 0

        overhead = move(b"x" * 1000)[f"bytes_{way}"] - 1000 if backend != "strict" else 0
        if backend != "strict":
            # From 1,000 bytes to 65,000 the msgpack length field does not grow, so the head is overhead + length.
            at_window = move(b"x" * (window - overhead - window_minus))
            assert at_window[f"messages_{way}"] == (1 if window_minus >= 0 else 2)
            assert at_window[f"bytes_{way}"] == window - window_minus

        assert move(b"x" * 100_000)[f"messages_{way}"] == 2
        segments = move([big(1), {"b": big(2)}, torch.ones(3)])
        assert segments[f"messages_{way}"] == 1 + 2
        assert 3 * MIB < segments[f"bytes_{way}"] < 3 * MIB + window + 1
        both = move([big(1), b"x" * 100_000])
        assert both[f"messages_{way}"] == 2 + 1

    run_ranks(ranks, backend=backend)


def test_receives_posted_ahead_complete_in_order_whoever_waits_first(backend: str) -> None:
    def ranks(rank: int) -> None:
        objects = [{"i": i, "t": torch.full((size,), i)} for i, size in enumerate([3, 300_000, 0, 70_000, 9_000, 1])]
        if rank == 0:
            for obj in objects:
                objcomm.send_object(obj, 1)
        else:
            works = [objcomm.irecv_object(0) for _ in objects]
            for i in (4, 0, 5, 2, 1, 3):
                assert_arrived(works[i].wait(), objects[i])
                assert works[i].wait() is works[i].wait()

    run_ranks(ranks, backend=backend)


def test_both_send_first_then_receive(backend: str) -> None:
    def ranks(rank: int) -> None:
        mine, theirs = big(3, rank), big(3, 1 - rank)
        for _ in range(3):
            work = objcomm.isend_object([mine, rank], 1 - rank)
            assert_arrived(objcomm.recv_object(1 - rank), [theirs, 1 - rank])
            work.wait()

    run_ranks(ranks, backend=backend)


def test_dropped_handles_lose_nothing(backend: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 0:
            for i in range(40):
                objcomm.isend_object({"i": i, "t": torch.full((50_000 + i,), i), "u": big(1, i)}, 1)
                gc.collect()
        else:
            objcomm.irecv_object(0)
            gc.collect()
            time.sleep(0.2)
            for i in range(1, 40):
                assert_arrived(objcomm.recv_object(0), {"i": i, "t": torch.full((50_000 + i,), i), "u": big(1, i)})

    run_ranks(ranks, backend=backend)


def test_dropped_sends_are_completed_and_their_memory_is_freed() -> None:
    def ranks(rank: int) -> None:
        from objcomm.pairs import all_pairs

        for i in range(5):
            if rank == 0:
                objcomm.isend_object(big(1, i), 1)
            else:
                objcomm.recv_object(0)
        if rank == 0:
            end = time.monotonic() + 10
            while all_pairs()[0].in_flight and time.monotonic() < end:
                time.sleep(0.01)
            assert not all_pairs()[0].in_flight

    run_ranks(ranks)


def test_a_dropped_send_is_still_delivered_when_its_process_ends_at_once() -> None:
    def ranks(rank: int) -> Any:
        if rank == 0:
            objcomm.isend_object({"last": big(2)}, 1)
            return None
        time.sleep(0.5)
        return objcomm.recv_object(0)

    assert_arrived(run_ranks(ranks)[1], {"last": big(2)})


def test_move_object(backend: str) -> None:
    def ranks(rank: int) -> None:
        obj = {"x": torch.arange(5), "n": 3}
        got = objcomm.move_object(obj if rank == 0 else (), 0, 1, channel="adapter7")
        assert_arrived(got, obj)
        assert (got is obj) == (rank == 0)
        for _ in range(2):
            work = objcomm.move_object(obj if rank == 1 else None, 1, 0, async_op=True)
            assert isinstance(work, objcomm.ObjectWork)
            assert_arrived(work.wait(), obj)
        assert objcomm.move_object(obj, rank, rank) is obj
        assert objcomm.move_object(obj, rank, rank, async_op=True).wait() is obj

    run_ranks(ranks, backend=backend)


def test_move_object_by_a_rank_that_takes_no_part() -> None:
    def ranks(rank: int) -> None:
        if rank == 2:
            with pytest.raises(objcomm.UsageError, match="rank 2 takes no part in a move from rank 0 to rank 1"):
                objcomm.move_object(None, 0, 1)
        else:
            objcomm.move_object("x", 0, 1)

    run_ranks(ranks, 3)


def test_into_fills_tensors_in_place(backend: str) -> None:
    def ranks(rank: int) -> None:
        sent: dict[str, Any] = {
            "big": big(2),
            "small": torch.arange(6.0).reshape(2, 3),
            "n": 5,
            "deep": [(torch.ones(2),)],
        }
        if rank == 0:
            objcomm.send_object(sent, 1)
            objcomm.send_object(sent, 1)
            objcomm.send_object("next", 1)
        else:
            into: dict[str, Any] = {
                "big": torch.zeros_like(sent["big"]),
                "small": torch.zeros(2, 3),
                "n": 0,
                "deep": [(torch.zeros(2),)],
            }
            got = objcomm.recv_object(0, into=into)
            assert_arrived(got, sent)
            assert (
                got["big"] is into["big"] and got["small"] is into["small"] and got["deep"][0][0] is into["deep"][0][0]
            )
            wrong: dict[str, Any] = {**into, "small": torch.zeros(3, 2)}
            before = wrong["big"].zero_().clone()
            with pytest.raises(objcomm.DecodeError) as caught:
                objcomm.recv_object(0, into=wrong)
            assert caught.value.path == "obj['small']"
            for word in ("[2, 3]", "[3, 2]", "float32"):
                assert word in str(caught.value)
            assert torch.equal(wrong["big"], before)
            assert objcomm.recv_object(0) == "next"

    run_ranks(ranks, backend=backend)


def test_subgroups_and_both_kinds_of_rank(backend: str) -> None:
    def ranks(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank == 0:
            with pytest.raises(objcomm.UsageError, match="not in the group"):
                objcomm.send_object(1, 2, group=group)
            with pytest.raises(objcomm.UsageError):
                objcomm.recv_object(group_src=0, group=group)
            return
        if rank == 1:
            objcomm.send_object(["by global rank", big(1)], 2, group=group)
            objcomm.send_object("by group rank", group_dst=1, group=group)
            assert objcomm.recv_object(group_src=1, group=group) == "back"
        else:
            assert_arrived(objcomm.recv_object(1, group=group), ["by global rank", big(1)])
            assert objcomm.recv_object(group_src=0, group=group) == "by group rank"
            objcomm.send_object("back", 1, group=group)
        wrongs: tuple[dict[str, Any], ...] = (
            {"dst": rank},
            {"dst": 0},
            {"dst": 17},
            {"group_dst": 2},
            {"group_dst": -1},
            {"dst": 1, "group_dst": 0},
            {},
        )
        for wrong in wrongs:
            with pytest.raises(objcomm.UsageError):
                objcomm.send_object(1, group=group, **wrong)

    run_ranks(ranks, 3, backend=backend)


def test_messages_of_two_groups_do_not_mix(backend: str) -> None:
    def ranks(rank: int) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank == 0:
            works = [objcomm.isend_object("one", 1, group=one), objcomm.isend_object("two", 1, group=two)]
            works.append(objcomm.isend_object("world", 1))
            for work in works:
                work.wait()
        else:
            assert objcomm.recv_object(0) == "world"
            assert objcomm.recv_object(0, group=two) == "two"
            assert objcomm.recv_object(0, group=one) == "one"

    run_ranks(ranks, backend=backend)


def test_a_programs_own_traffic_on_the_pair_does_not_mix_in() -> None:
    def ranks(rank: int) -> None:
        plain = torch.full((4,), 7.0)
        if rank == 0:
            works = [dist.isend(plain, 1), objcomm.isend_object({"a": big(1)}, 1), dist.isend(plain + 1, 1)]
            for work in works:
                work.wait()
        else:
            assert_arrived(objcomm.recv_object(0), {"a": big(1)})
            first, second = torch.zeros(4), torch.zeros(4)
            dist.recv(first, 0)
            dist.recv(second, 0)
            assert_arrived([first, second], [plain, plain + 1])

    run_ranks(ranks)


def test_threads_on_one_group_with_different_peers_and_on_one_pair() -> None:
    def ranks(rank: int) -> None:
        failures: list[BaseException] = []

        def talk(action: Any) -> threading.Thread:
            def run() -> None:
                try:
                    action()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def to(peer: int) -> None:
            for i in range(20):
                objcomm.send_object({"from": rank, "i": i, "t": torch.full((100 * i,), i)}, peer)

        def take(peer: int) -> None:
            for i in range(20):
                expected = {"from": peer, "i": i, "t": torch.full((100 * i,), i)}
                assert_arrived(objcomm.recv_object(peer), expected)

        others = [peer for peer in range(3) if peer != rank]
        for thread in [talk(lambda p=p: to(p)) for p in others] + [talk(lambda p=p: take(p)) for p in others]:
            thread.join()

        # Two threads that send and two that receive on one pair: objects stay whole, none is lost, none comes twice.
        seen: list[Any] = []

        def send_many(base: int) -> None:
            for i in range(25):
                objcomm.send_object({"id": base + i, "t": torch.full((3000,), base + i)}, 1)

        def take_many() -> None:
            for _ in range(25):
                seen.append(objcomm.recv_object(0))

        if rank < 2:
            actions = [lambda: send_many(0), lambda: send_many(100)] if rank == 0 else [take_many, take_many]
            for thread in [talk(action) for action in actions]:
                thread.join()
        assert not failures, failures
        if rank == 1:
            assert sorted(got["id"] for got in seen) == [*range(25), *range(100, 125)]
            for got in seen:
                assert_arrived(got["t"], torch.full((3000,), got["id"]))

    run_ranks(ranks, 3)


def test_a_process_group_may_be_made_again() -> None:
    def ranks(rank: int) -> None:
        for i in range(3):
            if i:
                store = dist.TCPStore("127.0.0.1", int(__import__("os").environ["MASTER_PORT"]), is_master=False)
                dist.init_process_group("gloo", store=dist.PrefixStore(str(i), store), rank=rank, world_size=2)
            if rank == 0:
                objcomm.send_object(i, 1)
            else:
                assert objcomm.recv_object(0) == i
            dist.barrier()
            dist.destroy_process_group()
        with pytest.raises(objcomm.UsageError, match="init_process_group"):
            objcomm.send_object(1, 1)

    run_ranks(ranks)


def test_no_tensor_is_ever_pickled() -> None:
    """torch's own pickling of tensors, parameters and storages is made to raise, then every kind of object is sent."""

    def ranks(rank: int) -> None:
        torch.manual_seed(11)
        values = [(name, make()) for name, make in VALUES]

        def refuse(self: Any, *args: Any) -> Any:
            raise AssertionError(f"torch's pickling of a {type(self).__name__} was called")

        for cls in (
            torch.Tensor,
            torch.nn.Parameter,
            torch.storage.UntypedStorage,
            torch.storage.TypedStorage,
        ):
            for method in ("__reduce_ex__", "__reduce__"):
                setattr(cls, method, refuse)
        for name, value in values:
            if rank == 0:
                objcomm.send_object(value, 1, channel=name)
            else:
                assert_arrived(objcomm.recv_object(0, channel=name), value)

    run_ranks(ranks)


def test_a_caller_that_has_set_a_default_device() -> None:
    def ranks(rank: int) -> None:
        obj = {"x": torch.arange(10.0), "big": big(1)}
        torch.set_default_device("meta")
        for _ in range(2):
            assert_arrived(objcomm.exchange_objects(obj, 1 - rank), obj)

    run_ranks(ranks)


def test_real_memory_is_asked_for_instead_of_a_crash() -> None:
    def ranks(rank: int) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        for _ in range(2):
            with FakeTensorMode(), pytest.raises(objcomm.UsageError, match="FakeTensorMode"):
                objcomm.send_object({"x": 1}, 1 - rank)
            assert objcomm.exchange_objects({"x": rank}, 1 - rank) == {"x": 1 - rank}

    run_ranks(ranks)


def test_a_receive_that_was_posted_ahead_overlaps_with_what_the_caller_does() -> None:
    """The large segment has arrived before anybody waits for it: the sender's wait ends meanwhile."""

    def ranks(rank: int) -> None:
        if rank == 0:
            work = objcomm.isend_object(big(32), 1)
            start = time.monotonic()
            work.wait()
            assert time.monotonic() - start < 4
        else:
            work = objcomm.irecv_object(0)
            time.sleep(6)
            assert_arrived(work.wait(), big(32))

    run_ranks(ranks)


class Holder:
    """A user's class, which is pickled."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@pytest.mark.parametrize("where", ["list", "holder", "sparse"])
def test_a_gradient_is_not_lost_silently_where_it_is_forbidden(where: str) -> None:
    def ranks(rank: int) -> None:
        weight = torch.ones(3, requires_grad=True)
        made: dict[str, tuple[Any, str]] = {
            "list": ({"a": [1, weight * 2]}, "obj['a'][1]"),
            "holder": ([Holder({"h": weight * 2})], "obj[0].inner['h']"),
            "sparse": ((weight * 2).to_sparse(), "obj"),
        }
        obj, path = made[where]
        calls: list[Any] = [
            lambda: objcomm.move_object(obj if rank == 0 else (), 0, 1, channel="adapter5", forbid_grad=True),
            lambda: objcomm.broadcast_object(obj if rank == 0 else (), 0, channel="adapter5", forbid_grad=True),
        ]
        for call in calls:
            with pytest.raises(objcomm.EncodeError if rank == 0 else objcomm.PeerError, match="grad") as caught:
                call()
            assert caught.value.path == path
            assert caught.value.channel == "adapter5"
            with torch.no_grad():
                call()

    run_ranks(ranks)


def test_what_was_moved_lives_no_longer_than_its_users(backend: str) -> None:
    """No reference cycle holds a message: memory is free again without the garbage collector."""

    def ranks(rank: int) -> None:
        gc.disable()
        refs: list[Any] = []
        for i in range(4):
            made: Any = None
            if rank == 0:
                made = [
                    Holder([torch.randn(3), torch.randn(300_000)]),
                    {"s": torch.eye(3).to_sparse()},
                    {1: (Holder(i),)},
                ]
            moved: Any = objcomm.move_object(made, 0, 1)
            refs += [weakref.ref(moved[0]), weakref.ref(moved[1]["s"]), weakref.ref(moved[2][1][0])]
            del made, moved
        # The last message may still be in the hands of a background thread.
        assert [ref() for ref in refs[:-3]] == [None] * (len(refs) - 3)

    run_ranks(ranks, backend=backend)


def test_a_receive_that_is_over_is_not_held_up_by_the_next(backend: str) -> None:
    """A thread that moves receives on may be waiting for the next message already, which depends on this one."""

    def ranks(rank: int) -> None:
        for i in range(200):
            if rank == 0:
                first, second = objcomm.irecv_object(1), objcomm.irecv_object(1)
                objcomm.send_object(first.wait(), 1)
                assert second.wait() == [i]
            else:
                objcomm.send_object(i, 0)
                objcomm.send_object([objcomm.recv_object(0)], 0)

    run_ranks(ranks, 2, backend=backend, timeout=60, group_timeout=10)
