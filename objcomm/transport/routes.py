"""A link: which way heads and segments go between this rank and one peer of one group.

Both ends must take the same way, so it follows from the group and from where the *sender's* memory is,
nothing else:

- heads: gloo if the group has it for the CPU, else the group's control side, else its backend for the CPU,
  else the one for its accelerator;
- memory on the CPU: the group's backend for the CPU, else the control side, else the backend for its
  accelerator;
- memory on an accelerator: the group's backend for that, unless it is gloo, else as memory on the CPU.

Between two ranks of one host, what would go over any of these from CPU memory, heads included, goes around the
network stack instead, if both ends can and want to: see :mod:`objcomm.transport.local`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..config import settings
from ..errors import UsageError
from . import accelerators, communicators, groups, pool, staging
from .base import Both, Pending
from .c10d import ElasticLane
from .control import control_of
from .lanes import ExactLane
from .local import LocalLane
from .stores import second_line

ELASTIC_WINDOW = 64 << 10
EXACT_WINDOW = 4 << 10


class GroupLink:
    """See :class:`~objcomm.transport.base.Link`. Must not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup, peer_group_rank: int) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank()
        self.peer = groups.global_rank(group, peer_group_rank)
        self.store = groups.store_of(group)
        backends = groups.backends_of(group)
        self.timeout = groups.timeout_of(group, "cpu" if "cpu" in backends else next(iter(backends)))
        self._bound = accelerators.bound_to(group)
        gloo = groups.gloo_of(group) or control_of(group)
        elastic = None if gloo is None else ElasticLane(gloo, peer_group_rank, self.peer)

        def exact(kind: str) -> ExactLane | None:
            backend = backends.get(kind, "gloo")
            # Where there is another way, both ends take it rather than fail.
            if backend == "gloo" or (elastic is not None and not communicators.can_open(backend)):
                return None
            return ExactLane(group, backend, kind, peer_group_rank, self.timeout)

        self._kind = accelerators.kind_here()
        host = exact("cpu")
        device = None if self._kind is None else exact(self._kind)
        lanes: list[staging.Lane] = [lane for lane in (elastic, host, device) if lane is not None]
        heads = elastic or host or (device and staging.DeviceHeads(device))
        if heads is None:
            raise UsageError(
                f"nothing that this rank has can use the backends of the group, {backends}",
                hint="call objcomm.init_control() on all ranks right after making the group",
            )
        self._local = LocalLane(
            second_line(group),
            self.rank,
            self.peer,
            (group.rank(), peer_group_rank),
            _GroupWay(heads, host or elastic or lanes[0], lanes, self.timeout),
            self.timeout,
            allowed=settings().local_transport,
            look=_do_nothing if elastic is None else functools.partial(_look, elastic),
        )
        self._lanes: list[staging.Lane] = [self._local] if device is None else [self._local, device]
        self._from_accelerator: staging.Lane = device or self._local
        self.exact = elastic is None
        self.window = EXACT_WINDOW if self.exact else ELASTIC_WINDOW

    @property
    def alive(self) -> bool:
        return groups.exists(self._group())

    @property
    def can_say_goodbye(self) -> bool:
        return self._local.direct or (self._local.chosen and not self.exact)

    @property
    def measured(self) -> bool:
        return self.exact or self._local.direct

    def describe(self) -> str:
        """Which way memory on the CPU takes, and why, for a person to read."""
        return self._local.describe()

    def send_head(self, tensor: torch.Tensor) -> Pending:
        return self._local.send(tensor)

    def recv_head(self, tensor: torch.Tensor) -> Pending:
        return self._local.recv(tensor)

    def send_segments(self, tensors: Sequence[torch.Tensor]) -> Pending:
        by_lane: dict[staging.Lane, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_lane.setdefault(self._way(tensor.device.type != "cpu"), []).append(tensor)
        return _one([staging.send(lane, part, self.timeout) for lane, part in by_lane.items()])

    def recv_segments(self, tensors: Sequence[torch.Tensor], accelerator: Sequence[bool]) -> Pending:
        by_lane: dict[staging.Lane, list[torch.Tensor]] = {}
        for tensor, on_accelerator in zip(tensors, accelerator, strict=True):
            by_lane.setdefault(self._way(on_accelerator), []).append(tensor)
        return _one([staging.recv(lane, part) for lane, part in by_lane.items()])

    def allocate(self, nbytes: int, accelerator: bool, device: torch.device | None) -> torch.Tensor:
        if device is None and accelerator and self._kind is not None:
            device = accelerators.receiving(self._kind, self._bound)
        if device is None or device.type == "cpu":
            return pool.take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _way(self, accelerator: bool) -> staging.Lane:
        return self._from_accelerator if accelerator else self._local


class _GroupWay:
    """What goes from and to CPU memory, over the process group."""

    def __init__(self, heads: staging.Heads, lane: staging.Lane, lanes: list[staging.Lane], timeout: float) -> None:
        self._lane = lane
        self._lanes = lanes
        self._timeout = timeout
        self.send = heads.send
        self.recv = heads.recv

    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        return staging.send(self._lane, tensors, self._timeout)

    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        return staging.recv(self._lane, tensors)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


def _do_nothing() -> None:
    return


def _look(elastic: ElasticLane) -> None:
    try:
        elastic.look()
    except RuntimeError as error:
        raise elastic.translated(error) from error


def _one(pendings: list[Pending]) -> Pending:
    return pendings[0] if len(pendings) == 1 else Both(pendings)


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, GroupLink]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def describe(group: dist.ProcessGroup, peer_group_rank: int) -> str:
    """Which way what is on the CPU takes to a peer of ``group``, and why: a sentence for a person to read.

    Before the two have exchanged anything it is not decided.
    """
    return link(group, peer_group_rank).describe()


def forget(group: dist.ProcessGroup) -> None:
    """Let go of the links of a group that was destroyed."""
    with _lock:
        _links.pop(group, None)


def link(group: dist.ProcessGroup, peer_group_rank: int) -> GroupLink:
    """The link to a peer, given by its rank in ``group``: the same one for as long as the group lives."""
    with _lock:
        of_group = _links.setdefault(group, {})
        found = of_group.get(peer_group_rank)
        if found is None:
            found = of_group[peer_group_rank] = GroupLink(group, peer_group_rank)
        return found
