"""The link over gloo: the way that heads and CPU segments take in most groups."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from objcomm.deadline import Deadline
from objcomm.errors import PeerError, TransferTimeout
from objcomm.transport import Link, link, resolve
from objcomm.transport.c10d import ElasticLane
from tests.links import error_of, filled, link_to
from tests.ranks import run_ranks


@pytest.mark.also_local
def test_heads_and_segments_arrive_in_order() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        deadline = Deadline(20)
        assert (there.rank, there.peer, there.window, there.exact) == (rank, 1 - rank, 64 << 10, False)
        assert (there.timeout, there.alive) == (30.0, True)
        if rank == 0:
            sent = [
                there.send_head(filled(100, 1)),
                there.send_head(filled(there.window, 2)),
                there.send_head(filled(70_000, 3)),
                there.send_segments([filled(5, 4), filled(0, 0), filled(3 << 20, 5)]),
                there.send_head(filled(1, 6)),
            ]
            for pending in reversed(sent):
                pending.wait(deadline)
                pending.wait(deadline)
            return
        window = torch.zeros(there.window, dtype=torch.uint8)
        there.recv_head(window).wait(deadline)
        assert window[:101].tolist() == [1] * 100 + [0]  # shorter than the receive
        there.recv_head(window).wait(deadline)
        assert (window == 2).all()
        rest = torch.zeros(70_000, dtype=torch.uint8)
        there.recv_head(rest).wait(deadline)
        assert (rest == 3).all()
        memory = [there.allocate(nbytes, False, None) for nbytes in (5, 0, 3 << 20)]
        # Where the sender's memory is makes no difference without a backend for it.
        there.recv_segments(memory, [False, True, True]).wait(deadline)
        assert (memory[0] == 4).all()
        assert (memory[2] == 5).all()
        there.recv_head(window).wait(deadline)
        assert window[0] == 6
        assert there.can_say_goodbye

    run_ranks(rank_main)


@pytest.mark.also_local
def test_both_may_send_first() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        mine = filled(1 << 20, rank)
        sent = [there.send_head(filled(10, rank)), there.send_segments([mine])]
        head, theirs = filled(there.window, 9), filled(1 << 20, 9)
        there.recv_head(head).wait(Deadline(20))
        there.recv_segments([theirs], [False]).wait(Deadline(20))
        for pending in sent:
            pending.wait(Deadline(20))
        assert head[9] == 1 - rank
        assert (theirs == 1 - rank).all()

    run_ranks(rank_main)


@pytest.mark.also_local
def test_long_segments_are_cut_alike_on_both_ends() -> None:
    def rank_main(rank: int) -> None:
        from objcomm.transport import base, message_count

        base.MAX_MESSAGE_BYTES = 1000
        assert [message_count(n) for n in (0, 1, 1000, 1001, 2500)] == [1, 1, 1, 2, 3]
        there = link_to(1 - rank)
        data = (torch.arange(2500) % 251).to(torch.uint8)
        if rank == 0:
            there.send_segments([data, data[:1000], data[:1]]).wait(Deadline(20))
        else:
            memory = [there.allocate(nbytes, False, None) for nbytes in (2500, 1000, 1)]
            there.recv_segments(memory, [False] * 3).wait(Deadline(20))
            assert torch.equal(memory[0], data)
            assert torch.equal(memory[1], data[:1000])
            assert memory[2][0] == 0

    run_ranks(rank_main)


@pytest.mark.also_local
def test_messages_of_the_program_do_not_mix_with_those_of_a_link() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        window = filled(there.window, 0)
        if rank == 0:
            theirs = dist.isend(torch.ones(7), 1)
            ours = there.send_head(filled(3, 5))
            dist.isend(torch.ones(5) * 2, 1, tag=3).wait()
            ours.wait(Deadline(20))
            theirs.wait()
        else:
            pending = there.recv_head(window)
            tagged, plain = torch.zeros(5), torch.zeros(7)
            dist.recv(tagged, 0, tag=3)
            dist.recv(plain, 0)
            pending.wait(Deadline(20))
            assert window[:4].tolist() == [5, 5, 5, 0]
            assert (plain == 1).all()
            assert (tagged == 2).all()

    run_ranks(rank_main)


@pytest.mark.also_local
def test_a_subgroup_whose_ranks_differ_from_the_global_ones() -> None:
    def rank_main(rank: int) -> None:
        group = dist.new_group([2, 3, 1], use_local_synchronization=True) if rank else None
        if rank == 0:
            return
        # sorted: group ranks 0, 1, 2 are global 1, 2, 3
        here, there = (2, 3) if rank == 2 else (3, 2)
        if rank == 1:
            return
        peer = resolve(group, there, None, "dst")
        assert (peer.rank, peer.group_rank) == (there, there - 1)
        assert resolve(group, None, there - 1, "dst") == peer
        link_ = link(peer.group, peer.group_rank)
        assert (link_.rank, link_.peer) == (here, there)
        assert link_ is link(peer.group, peer.group_rank)
        window = filled(link_.window, 0)
        received = link_.recv_head(window)
        link_.send_head(filled(4, rank)).wait(Deadline(20))
        received.wait(Deadline(20))
        assert window[0] == there

    run_ranks(rank_main, 4)


def test_time_out_closes_the_link_at_once_and_says_why() -> None:
    def rank_main(rank: int) -> None:
        peers = [r for r in range(3) if r != rank]
        window = filled(1 << 16, 0)
        if rank == 0:
            late, other = link_to(1), link_to(2)
            first, second = late.recv_head(window), late.recv_head(window.clone())
            began = time.monotonic()
            error = error_of(lambda: first.wait(Deadline(0.2)))
            assert isinstance(error, TransferTimeout)
            assert isinstance(error, TimeoutError)
            assert "rank 1 did not come within 0.2 s" in str(error)
            assert error_of(lambda: first.wait(Deadline(5))) is error
            for failing in (
                lambda: second.wait(Deadline(20)),
                lambda: late.send_head(window),
                lambda: late.recv_head(window),
                # gloo closes all connections of this rank in the group
                lambda: other.send_segments([window]),
            ):
                text = str(error_of(failing))
                assert "closed" in text
                assert "rank 1 ran out of time" in text
            assert time.monotonic() - began < 2
        else:
            # Notices at once, though it has half a minute.
            began = time.monotonic()
            error = error_of(lambda: link_to(0).recv_head(window).wait(Deadline(30)))
            assert isinstance(error, PeerError)
            assert "rank 0 is gone" in str(error)
            assert time.monotonic() - began < 10
            # What does not concern rank 0 goes on.
            between = link_to(peers[1])
            received = between.recv_head(window)
            between.send_head(filled(1, rank)).wait(Deadline(20))
            received.wait(Deadline(20))
            assert window[0] == peers[1]

    run_ranks(rank_main, 3)


@pytest.mark.also_local
def test_death_of_the_peer_is_noticed_at_once() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        if rank == 1:
            there.send_head(filled(8, 1)).wait(Deadline(20))
            time.sleep(0.2)
            os._exit(1)
        window = filled(there.window, 0)
        arrived = there.recv_head(window)
        waiting = there.recv_head(window.clone())
        sent = there.send_segments([filled(1 << 22, 1)])
        began = time.monotonic()
        error = error_of(lambda: waiting.wait(Deadline(30)))
        assert time.monotonic() - began < 5
        assert isinstance(error, PeerError)
        assert "the connection to rank 1 is gone" in str(error)
        assert "GLHF" not in str(error)
        assert ".cc:" not in str(error)
        assert isinstance(error_of(lambda: sent.wait(Deadline(30))), PeerError)
        arrived.wait(Deadline(30))  # what came before the end is not lost
        assert window[7] == 1
        for failing in (lambda: there.send_head(window), lambda: there.recv_head(window)):
            assert isinstance(error_of(failing), PeerError)
        there.close()

    run_ranks(rank_main, may_die=[1])


@pytest.mark.also_local
def test_close_is_noticed_on_both_ends() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        window = filled(there.window, 0)
        waiting = there.recv_head(window)
        if rank == 0:
            there.close()
            there.close()
            error = error_of(lambda: waiting.wait(Deadline(30)))
            assert "this rank broke off its transfers with rank 1" in str(error)
            assert isinstance(error_of(lambda: there.send_head(window)), PeerError)
        else:
            began = time.monotonic()
            assert isinstance(error_of(lambda: waiting.wait(Deadline(30))), PeerError)
            assert time.monotonic() - began < 10

    run_ranks(rank_main)


@pytest.mark.also_local
def test_waits_let_other_threads_run() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        if rank == 1:
            time.sleep(0.5)
            there.send_head(filled(1, 1)).wait(Deadline(20))
            return
        pending = there.recv_head(filled(there.window, 0))
        ticks = 0
        done = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not done.wait(0.01):
                ticks += 1

        thread = threading.Thread(target=tick)
        thread.start()
        pending.wait(Deadline(20))
        done.set()
        thread.join()
        assert ticks > 5

    run_ranks(rank_main)


@pytest.mark.also_local
def test_a_pending_transfer_owns_its_memory() -> None:
    def rank_main(rank: int) -> None:
        there = link_to(1 - rank)
        if rank == 1:
            time.sleep(0.3)
            memory = [filled(1 << 20, 0) for _ in range(4)]
            there.recv_segments(memory, [False] * 4).wait(Deadline(20))
            assert [int(m.float().mean()) for m in memory] == [0, 1, 2, 3]
            return
        tensors = [filled(1 << 20, n) for n in range(4)]
        owned = weakref.ref(tensors[0])
        pending = there.send_segments(tensors)
        del tensors
        gc.collect()
        assert owned() is not None
        for _ in range(8):
            filled(1 << 20, 99)
        pending.wait(Deadline(20))
        assert owned() is None

    run_ranks(rank_main)


@pytest.mark.also_local
def test_a_group_that_is_destroyed_and_made_again() -> None:
    def rank_main(rank: int) -> None:
        seen: list[weakref.ref[Link]] = []
        for attempt in range(3):
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False)
            prefixed = dist.PrefixStore(f"attempt{attempt}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=2, timeout=timedelta(seconds=20))
            there = link_to(1 - rank)
            assert there.alive
            assert all(one() is None or one() is not there for one in seen)
            window = filled(there.window, 0)
            received = there.recv_head(window)
            there.send_head(filled(3, attempt)).wait(Deadline(20))
            received.wait(Deadline(20))
            assert window[2] == attempt
            dist.barrier()
            dist.destroy_process_group()
            assert not there.alive
            seen.append(weakref.ref(there))
            del there, received
        gc.collect()
        assert [one() for one in seen] == [None] * 3

    run_ranks(rank_main, backend=None)


def test_torch_debug_wrapper() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts a wrapper in front of gloo."""

    def rank_main(rank: int) -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        group = dist.new_group([0, 1], backend="gloo")
        there = link_to(1 - rank, group)
        assert not there.exact
        window = filled(there.window, 0)
        received = there.recv_head(window)
        there.send_head(filled(3, 7)).wait(Deadline(20))
        received.wait(Deadline(20))
        assert window[:4].tolist() == [7, 7, 7, 0]

    run_ranks(rank_main)


class _CountedBackend:
    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _CountedBackend:
        return self

    recv = send

    def wait(self, timeout: timedelta) -> bool:
        return True


def test_cost_of_a_message() -> None:
    """Ten microseconds may come on top of the backend's own call; a slow machine is no reason to fail."""
    lane = ElasticLane(_CountedBackend(), 1, 1)
    memory, deadline = filled(100, 0), Deadline(60)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(500):
            lane.send(memory).wait(deadline)
        best = min(best, (time.perf_counter() - began) / 500)
    assert best < 10e-6
