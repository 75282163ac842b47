"""Between where a tensor lives and where its lane works: copies, and who waits for what.

On accelerators the host waits in two cases only: before the CPU reads what a device writes, and for heads,
which are the place where a peer that does not come is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..deadline import Deadline
from ..errors import TransferTimeout
from . import accelerators
from .base import Pending
from .lanes import ExactLane


class Heads(Protocol):
    """A way between two ranks for heads, which are on the CPU."""

    def send(self, tensor: torch.Tensor) -> Pending: ...
    def recv(self, tensor: torch.Tensor) -> Pending: ...


class Lane(Protocol):
    """A way between two ranks for memory on ``device``."""

    @property
    def device(self) -> torch.device: ...
    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending: ...
    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending: ...
    def close(self) -> None: ...


def send(lane: Lane, tensors: Sequence[torch.Tensor], timeout: float) -> Pending:
    """Send flat uint8 tensors over a lane, from wherever they live.

    Raises:
        TransferTimeout: this rank's own device does not finish what is to be sent within ``timeout`` seconds.
    """
    staged = [tensor if tensor.device == lane.device else _copy(tensor, lane.device) for tensor in tensors]
    if lane.device.type == "cpu":
        # One wait for all that is being copied.
        deadline = Deadline(timeout)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            if not accelerators.reached(device, deadline):
                raise TransferTimeout(f"{device} has not finished what is to be sent within {timeout:g} s")
    return lane.send_all(staged)


def recv(lane: Lane, tensors: Sequence[torch.Tensor]) -> Pending:
    """Receive flat uint8 tensors from a lane into wherever they live."""
    landings = [tensor if tensor.device == lane.device else _landing(tensor, lane.device) for tensor in tensors]
    pending = lane.recv_all(landings)
    copies = [(tensor, landing) for tensor, landing in zip(tensors, landings, strict=True) if tensor is not landing]
    return _Landed(lane, pending, copies) if copies else pending


class DeviceHeads:
    """Heads over a lane that works on an accelerator: through pinned memory, on a stream of their own.

    A head must not queue up behind the computation that is on the caller's stream, and it is waited for by
    the host, for as long as the deadline allows: on the sender too, which otherwise would never notice that
    nobody receives.
    """

    def __init__(self, lane: ExactLane) -> None:
        self._lane = lane
        self._device = lane.device
        self._stream: Any = accelerators.new_stream(lane.device)

    def send(self, tensor: torch.Tensor) -> Pending:
        with accelerators.on_stream(self._device, self._stream):
            return _Head(self._lane, self._stream, self._lane.send(_copy(tensor, self._device)), None, None)

    def recv(self, tensor: torch.Tensor) -> Pending:
        with accelerators.on_stream(self._device, self._stream):
            landing = _landing(tensor, self._device)
            return _Head(self._lane, self._stream, self._lane.recv(landing), tensor, landing)


class _Head:
    __slots__ = ("_lane", "_landing", "_pending", "_stream", "_target")

    def __init__(
        self,
        lane: ExactLane,
        stream: Any,
        pending: Pending,
        target: torch.Tensor | None,
        landing: torch.Tensor | None,
    ) -> None:
        self._lane = lane
        self._stream = stream
        self._pending: Pending | None = pending
        self._target = target
        self._landing = landing

    def wait(self, deadline: Deadline) -> None:
        if self._pending is None:
            return
        device = self._lane.device
        with accelerators.on_stream(device, self._stream):
            self._pending.wait(deadline)
            host = None
            if self._landing is not None:
                host = accelerators.pinned(self._landing.numel(), device)
                host.copy_(self._landing, non_blocking=True)
            await_device(self._lane, deadline)
        if host is not None and self._target is not None:
            self._target.copy_(host)
        self._pending = self._target = self._landing = None


class _Landed:
    """A receive whose bytes still have to be copied to where they are wanted."""

    __slots__ = ("_copies", "_lane", "_pending")

    def __init__(self, lane: Lane, pending: Pending, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._lane = lane
        self._pending = pending
        self._copies = copies

    def wait(self, deadline: Deadline) -> None:
        self._pending.wait(deadline)
        if not self._copies:
            return
        to_cpu = any(target.device.type == "cpu" for target, _ in self._copies)
        if to_cpu:
            await_device(self._lane, deadline)
        for target, landing in self._copies:
            target.copy_(landing, non_blocking=target.device.type == "cpu" or landing.is_pinned())
        if to_cpu:
            accelerators.reached(self._lane.device, deadline)
        self._copies = []


def await_device(lane: Lane, deadline: Deadline) -> None:
    """Let the host wait until what was received has reached the device.

    Raises:
        TransferTimeout: the peer did not come in time. The lane is ended.
    """
    if not isinstance(lane, ExactLane) or not lane.has_streams:
        return
    lane.check()
    if not accelerators.reached(lane.device, deadline):
        raise lane.fail(TransferTimeout(f"the peer did not come within {deadline.seconds:g} s"))


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same bytes on another device. Before the host reads them it has to wait for the tensor's device."""
    if device.type == "cpu":
        host = accelerators.pinned(tensor.numel(), tensor.device)
        host.copy_(tensor, non_blocking=True)
        return host
    if tensor.device.type != "cpu":
        return tensor.to(device)
    # By way of pinned memory: once it has waited, on the host, the caller may change its own.
    host = accelerators.pinned(tensor.numel(), device)
    host.copy_(tensor)
    return host.to(device, non_blocking=host.is_pinned())


def _landing(target: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(target.numel(), dtype=torch.uint8, device=device)
    return accelerators.pinned(target.numel(), target.device)
