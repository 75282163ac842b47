"""A link: which way heads and segments go between this rank and one peer of one group.

Both ends must take the same way, so it follows from the group and from where the *sender's* memory is, nothing else:

- heads: gloo if the group has it for the CPU, else the group's control side, else its backend for the CPU, else the one for
  its accelerator;
- memory on the CPU: the group's backend for the CPU, else the control side, else the backend for its accelerator;
- memory on an accelerator: the group's backend for that, unless it is gloo, else as memory on the CPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import groups, hugepages, staging
from .base import Both, Pending
from .c10d import ElasticLane
from .control import control_of
from .lanes import ExactLane

ELASTIC_WINDOW = 64 << 10
EXACT_WINDOW = 4 << 10

Lane = ElasticLane | ExactLane


class GroupLink:
    """See :class:`~objcomm.transport.base.Link`. Must not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup, peer_group_rank: int) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank()
        self.peer = groups.global_rank(group, peer_group_rank)
        self.store = groups.store_of(group)
        backends = groups.backends_of(group)
        self._accelerator = staging.accelerator_of(group, backends)
        control = control_of(group)
        elastic, host, device = None, None, None
        if backends.get("cpu") == "gloo":
            control = groups.backend_of(group, "cpu")
        if control is not None:
            elastic = ElasticLane(control, peer_group_rank, self.peer)
        timed = "cpu" if "cpu" in backends else next(iter(backends))
        self.timeout = groups.timeout_of(group, timed)
        if backends.get("cpu", "gloo") != "gloo":
            host = ExactLane(group, backends["cpu"], torch.device("cpu"), self.peer, self.timeout)
        kind = next((kind for kind, name in backends.items() if kind != "cpu" and name != "gloo"), None)
        if kind is not None and self._accelerator is not None and self._accelerator.type == kind:
            device = ExactLane(group, backends[kind], self._accelerator, self.peer, self.timeout)
        self._elastic = elastic
        lanes: list[Lane] = [lane for lane in (elastic, host, device) if lane is not None]
        self._lanes = lanes
        self._heads: Lane = lanes[0]
        self._from_cpu: Lane = host or elastic or lanes[0]
        self._from_accelerator: Lane = device or self._from_cpu
        self.exact = elastic is None
        self.window = EXACT_WINDOW if self.exact else ELASTIC_WINDOW

    @property
    def alive(self) -> bool:
        return groups.exists(self._group())

    @property
    def can_say_goodbye(self) -> bool:
        return not self.exact

    def send_head(self, tensor: torch.Tensor) -> Pending:
        return self._heads.send(tensor)

    def recv_head(self, tensor: torch.Tensor) -> Pending:
        return self._heads.recv(tensor)

    def send_segments(self, tensors: Sequence[torch.Tensor]) -> Pending:
        by_lane: dict[Lane, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_lane.setdefault(self._way(tensor.device.type != "cpu"), []).append(tensor)
        return _one([staging.send(lane, part) for lane, part in by_lane.items()])

    def recv_segments(self, tensors: Sequence[torch.Tensor], accelerator: Sequence[bool]) -> Pending:
        by_lane: dict[Lane, list[torch.Tensor]] = {}
        for tensor, on_accelerator in zip(tensors, accelerator, strict=True):
            by_lane.setdefault(self._way(on_accelerator), []).append(tensor)
        return _one([staging.recv(lane, part) for lane, part in by_lane.items()])

    def allocate(self, nbytes: int, accelerator: bool, device: torch.device | None) -> torch.Tensor:
        if device is None and accelerator:
            device = self._accelerator
        if device is None or device.type == "cpu":
            return hugepages.empty(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _way(self, accelerator: bool) -> Lane:
        return self._from_accelerator if accelerator else self._from_cpu


def _one(pendings: list[Pending]) -> Pending:
    return pendings[0] if len(pendings) == 1 else Both(pendings)


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, GroupLink]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def link(group: dist.ProcessGroup, peer_group_rank: int) -> GroupLink:
    """The link between this rank and a peer, given by its rank in ``group``: one for as long as the group lives."""
    with _lock:
        of_group = _links.setdefault(group, {})
        found = of_group.get(peer_group_rank)
        if found is None:
            found = of_group[peer_group_rank] = GroupLink(group, peer_group_rank)
        return found
