"""Random calls for the soak. Every rank makes the same steps in the same order, drawn from the same seed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import objcomm

from .soak_objects import Ordinary, checksum, random_object, random_tensor

# What a group that is made to time out waits for.
_SOON = 0.2


class Mistake(AssertionError):
    """Something arrived that was not sent, or an error did not come."""


class Breaks:
    """Is sent well, and cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return _break, ()


def _break() -> None:
    raise ValueError("it breaks when it is rebuilt")


class Caller:
    """Makes the steps of one rank.

    Args:
        groups: of all ranks, each to be used in turn.
    """

    def __init__(self, seed: int, groups: Sequence[dist.ProcessGroup]) -> None:
        self._seed = seed
        self._groups = groups
        self._rank = dist.get_rank()
        self._ranks = list(range(dist.get_world_size()))
        self._step = 0
        self.checked = 0
        self.calls: Counter[str] = Counter()
        self._kinds: list[tuple[Callable[[random.Random, Any], None], int]] = [
            (self.one_way, 20),
            (self.ahead, 15),
            (self.exchange, 10),
            (self.into, 6),
            (self.threads, 3),
            (self.broadcast, 8),
            (self.scatter, 8),
            (self.gather, 8),
            (self.all_gather, 8),
            (self.all_to_all, 8),
            (self.gradients, 8),
            (self.cannot_be_sent, 4),
            (self.cannot_be_built, 4),
            (self.is_refused, 4),
            (self.out_of_step, 4),
            (self.fails_among_all, 3),
        ]

    def step(self) -> None:
        """The next call, on those ranks that take part in it."""
        rng = random.Random(f"{self._seed} {self._step}")
        kind = rng.choices([kind for kind, _ in self._kinds], [weight for _, weight in self._kinds])[0]
        self.calls[kind.__name__] += 1
        kind(rng, rng.choice(self._groups))
        self._step += 1

    # -- what is sent ------------------------------------------------------------------------------------------------

    def _made(self, to: int | None, *, plain: bool = False, obj: Any = None) -> dict[str, Any]:
        """An object of this rank's own, with what the receiver shall find in it."""
        rng = random.Random(f"{self._seed} {self._step} {self._rank} {to}")
        obj = random_object(rng, plain=plain) if obj is None else obj
        return {"step": self._step, "from": self._rank, "to": to, "sum": checksum(obj), "obj": obj}

    def _check(self, arrived: Any, source: int, to: int | None = None, step: int | None = None) -> Any:
        expected = (self._step if step is None else step, source, to)
        if not isinstance(arrived, dict) or (arrived["step"], arrived["from"], arrived["to"]) != expected:
            raise Mistake(f"step {self._step}: what arrived from rank {source} is another message: {arrived!r:.200}")
        if checksum(arrived["obj"]) != arrived["sum"]:
            raise Mistake(f"step {self._step}: what arrived from rank {source} is not what was sent")
        self.checked += 1
        return arrived["obj"]

    def _two(self, rng: random.Random) -> tuple[int, int]:
        src, dst = rng.sample(self._ranks, 2)
        return src, dst

    def _fails(self, call: Callable[[], object], *kinds: type[objcomm.ObjcommError]) -> None:
        try:
            call()
        except kinds:
            return
        raise Mistake(f"step {self._step}: a call came back that had to raise {kinds[0].__name__}")

    # -- between two ranks -------------------------------------------------------------------------------------------

    def one_way(self, rng: random.Random, group: Any) -> None:
        """Blocking, in one of its forms."""
        src, dst = self._two(rng)
        how, channel = rng.randrange(4), rng.choice(["", "a", "stage 2"])
        mine = self._made(dst) if self._rank == src else None
        if self._rank not in (src, dst):
            return
        if how == 0:
            arrived = objcomm.move_object(mine, src, dst, group=group, channel=channel)
        elif how == 1:
            work: Any = objcomm.move_object(mine, src, dst, group=group, channel=channel, async_op=True)
            arrived = work.wait()
        elif mine is not None:
            objcomm.send_object(mine, dst, group=group, channel=channel)
            arrived = None
        else:
            arrived = objcomm.recv_object(src, group=group, channel=channel)
        if self._rank == dst:
            self._check(arrived, src, dst)

    def ahead(self, rng: random.Random, group: Any) -> None:
        """Several posted ahead, and waited for in any order or not at all."""
        src, dst = self._two(rng)
        count = rng.randint(2, 8)
        order = rng.sample(range(count), count)
        dropped = rng.random() < 0.3
        if self._rank == src:
            sends = [objcomm.isend_object(self._made(dst), dst, group=group) for _ in range(count)]
            for index in order[:1] if dropped else order:
                sends[index].wait()
        elif self._rank == dst:
            receives = [objcomm.irecv_object(src, group=group) for _ in range(count)]
            for index in order if not dropped else [count - 1]:
                self._check(receives[index].wait(), src, dst)

    def exchange(self, rng: random.Random, group: Any) -> None:
        """Both ways at once."""
        one, other = self._two(rng)
        if self._rank in (one, other):
            peer = one + other - self._rank
            self._check(objcomm.exchange_objects(self._made(peer), peer, group=group), peer, self._rank)

    def into(self, rng: random.Random, group: Any) -> None:
        """Into memory that is there already."""
        src, dst = self._two(rng)
        obj: dict[str, Any] = {
            "a": [random_tensor(rng).detach().contiguous() for _ in range(3)],
            "b": torch.ones(300_000),
        }
        if self._rank == src:
            objcomm.send_object(self._made(dst, obj=obj), dst, group=group)
        elif self._rank == dst:
            place: Any = {"a": [torch.zeros_like(tensor) for tensor in obj["a"]], "b": torch.zeros(300_000)}
            frame = {"step": 0, "from": 0, "to": 0, "sum": 0, "obj": place}
            arrived = self._check(objcomm.recv_object(src, group=group, into=frame), src, dst)
            if arrived["b"] is not place["b"]:
                raise Mistake(f"step {self._step}: into= was not filled")

    def threads(self, rng: random.Random, group: Any) -> None:
        """Two threads a rank, each in a group of its own."""
        one, other = self._two(rng)
        if self._rank not in (one, other):
            return
        peer = one + other - self._rank
        failures: list[BaseException] = []

        def talk(own: Any) -> None:
            try:
                for _ in range(4):
                    self._check(objcomm.exchange_objects(self._made(peer), peer, group=own), peer, self._rank)
            except BaseException as error:
                failures.append(error)

        talking = [threading.Thread(target=talk, args=(own,)) for own in self._groups[:2]]
        for thread in talking:
            thread.start()
        for thread in talking:
            thread.join()
        if failures:
            raise failures[0]

    def gradients(self, rng: random.Random, group: Any) -> None:
        """There and back again."""
        src, dst = self._two(rng)
        size, factor = rng.choice([3, 2000, 200_000]), rng.randint(1, 9)
        if self._rank == src:
            weight = torch.ones(size, requires_grad=True)
            sent = objcomm.autograd.send_object({"x": weight * 2, "about": "step"}, dst, group=group)
            sent.backward()
            if weight.grad is None or not bool((weight.grad == 2 * factor).all()):
                raise Mistake(f"step {self._step}: the gradient is {weight.grad}")
            self.checked += 1
        elif self._rank == dst:
            received = objcomm.autograd.recv_object(src, group=group)
            (received.obj["x"] * factor).sum().backward()
            received.send_grads()

    # -- among several -----------------------------------------------------------------------------------------------

    def _members(self, rng: random.Random) -> tuple[list[int], int, bool]:
        """Who takes part, one of them, and whether with a handle."""
        members = self._ranks if rng.random() < 0.5 else rng.sample(self._ranks, rng.randint(2, len(self._ranks)))
        return members, rng.choice(members), rng.random() < 0.25

    def broadcast(self, rng: random.Random, group: Any) -> None:
        members, src, handle = self._members(rng)
        if self._rank in members:
            mine = self._made(None) if self._rank == src else None
            arrived = _waited(objcomm.broadcast_object(mine, src, group=group, ranks=members, async_op=handle), handle)
            self._check(arrived, src)

    def scatter(self, rng: random.Random, group: Any) -> None:
        members, src, handle = self._members(rng)
        if self._rank in members:
            mine = [self._made(to) for to in members] if self._rank == src else None
            arrived = _waited(objcomm.scatter_objects(mine, src, group=group, ranks=members, async_op=handle), handle)
            self._check(arrived, src, self._rank)

    def gather(self, rng: random.Random, group: Any) -> None:
        members, dst, _ = self._members(rng)
        if self._rank in members:
            arrived = objcomm.gather_objects(self._made(dst), dst, group=group, ranks=members)
            for source, obj in zip(members, arrived or [], strict=bool(arrived)):
                self._check(obj, source, dst)

    def all_gather(self, rng: random.Random, group: Any) -> None:
        members, _, handle = self._members(rng)
        if self._rank in members:
            mine = self._made(None)
            arrived = _waited(objcomm.all_gather_objects(mine, group=group, ranks=members, async_op=handle), handle)
            for source, obj in zip(members, arrived, strict=True):
                self._check(obj, source)

    def all_to_all(self, rng: random.Random, group: Any) -> None:
        members, _, handle = self._members(rng)
        if self._rank in members:
            mine = [self._made(to) for to in members]
            arrived = _waited(objcomm.all_to_all_objects(mine, group=group, ranks=members, async_op=handle), handle)
            for source, obj in zip(members, arrived, strict=True):
                self._check(obj, source, self._rank)

    # -- errors, after each of which the next call must work ---------------------------------------------------------

    def cannot_be_sent(self, rng: random.Random, group: Any) -> None:
        src, dst = self._two(rng)
        bad = {"fine": random_tensor(rng), "lock": threading.Lock()}
        if self._rank == src:
            self._fails(lambda: objcomm.send_object(bad, dst, group=group), objcomm.EncodeError)
        elif self._rank == dst:
            self._fails(lambda: objcomm.recv_object(src, group=group), objcomm.PeerError)

    def cannot_be_built(self, rng: random.Random, group: Any) -> None:
        src, dst = self._two(rng)
        if self._rank == src:
            objcomm.send_object([Breaks(), random_tensor(rng)], dst, group=group)
        elif self._rank == dst:
            self._fails(lambda: objcomm.recv_object(src, group=group), objcomm.DecodeError)

    def is_refused(self, rng: random.Random, group: Any) -> None:
        src, dst = self._two(rng)
        if self._rank == src:
            objcomm.send_object([Ordinary(a=1), random_tensor(rng)], dst, group=group)
        elif self._rank == dst:
            objcomm.configure(trust="restricted")
            try:
                self._fails(lambda: objcomm.recv_object(src, group=group), objcomm.TrustError)
            finally:
                objcomm.configure(trust="cluster")

    def out_of_step(self, rng: random.Random, group: Any) -> None:
        src, dst = self._two(rng)
        if self._rank == src:
            objcomm.send_object(random_tensor(rng), dst, group=group, channel="one")
        elif self._rank == dst:
            self._fails(lambda: objcomm.recv_object(src, group=group, channel="other"), objcomm.ProtocolError)

    def fails_among_all(self, rng: random.Random, group: Any) -> None:
        bad, to = self._two(rng)
        which = rng.randrange(3)
        mine: Any = threading.Lock() if self._rank == bad else random_tensor(rng)
        kind = objcomm.EncodeError if self._rank == bad else objcomm.PeerError
        if which == 0:
            self._fails(lambda: objcomm.all_gather_objects(mine, group=group), kind)
        elif which == 1:
            self._fails(lambda: objcomm.broadcast_object(mine, bad, group=group), kind)
        else:
            self._fails(lambda: objcomm.gather_objects(mine, to, group=group), kind)

    def a_group_that_breaks(self) -> None:
        """A group made for the purpose, in which nobody sends what rank 1 waits for. Every rank calls this."""
        self.calls["a_group_that_breaks"] += 1
        group: Any = dist.new_group(timeout=timedelta(seconds=30))
        self._check(objcomm.broadcast_object(self._made(None) if self._rank == 0 else None, 0, group=group), 0)
        if self._rank == 1:
            self._fails(lambda: objcomm.recv_object(0, group=group, timeout=_SOON), objcomm.TransferTimeout)
            self._fails(lambda: objcomm.recv_object(0, group=group, timeout=_SOON), objcomm.PeerError)
        objcomm.all_gather_objects(None, group=self._groups[0])
        if self._rank == 0:
            with suppress(objcomm.ObjcommError):
                objcomm.send_object("nobody takes it", 1, group=group, timeout=_SOON)
            self._fails(lambda: objcomm.send_object("nor this", 1, group=group), objcomm.PeerError)
        dist.destroy_process_group(group)


def _waited(outcome: Any, handle: bool) -> Any:
    return outcome.wait() if handle else outcome
