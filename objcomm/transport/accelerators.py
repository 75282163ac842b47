"""What depends on the kind of accelerator: the current device, streams, memory that it copies by itself."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist

from ..deadline import Deadline
from . import hugepages

# Above this, memory that cannot be paged out is too dear.
_MAX_PINNED_BYTES = 1 << 30
# Most waits for a device end within the spin; past it this thread sleeps for longer and longer.
_SPIN_SECONDS = 0.0002
_MAX_NAP_SECONDS = 0.001


def module_of(device: torch.device) -> Any:
    """``torch.cuda`` and its like; ``None`` for a device that has no such module."""
    return getattr(torch, device.type, None)


def has_streams(kind: str) -> bool:
    """Whether work on such devices is queued on streams, so that the host need not wait for it."""
    module = getattr(torch, kind, None)
    return kind != "cpu" and all(hasattr(module, name) for name in ("current_stream", "stream", "Event"))


def kind_here() -> str | None:
    """The kind of this process's accelerator, if it has one. Wakes up no device."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return "cuda" if torch.cuda.is_available() else None
    device = torch.accelerator.current_accelerator()
    return None if device is None or not torch.accelerator.is_available() else device.type


def receiving(kind: str, bound: torch.device | None) -> torch.device:
    """Where this rank receives: on the device that its group is bound to, else on the current one."""
    if bound is not None and bound.type == kind:
        return bound
    module = module_of(torch.device(kind))
    return torch.device(kind, module.current_device() if hasattr(module, "current_device") else 0)


def bound_to(group: dist.ProcessGroup) -> torch.device | None:
    """The device that the group was bound to when it was made."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    return bound


def stream_of(device: torch.device) -> Any:
    """The current stream; ``None`` where there are none."""
    return module_of(device).current_stream(device) if has_streams(device.type) else None


def new_stream(device: torch.device) -> Any:
    """A stream of one's own; ``None`` where there are none."""
    return module_of(device).Stream(device) if has_streams(device.type) else None


def on_stream(device: torch.device, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make ``stream`` the current one of this thread, and its device the current device."""
    return contextlib.nullcontext() if stream is None else module_of(device).stream(stream)


def use_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread: a new thread begins on the first, and wakes it up."""
    module = module_of(device)
    if hasattr(module, "set_device"):
        module.set_device(device)


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """CPU memory, flat uint8, that ``device`` copies to and from without the host, where that can be had.

    Torch's allocator hands it out again only when the copies that were queued are over.
    """
    if has_streams(device.type) and 0 < nbytes <= _MAX_PINNED_BYTES:
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return hugepages.empty(nbytes)


def reached(device: torch.device, deadline: Deadline) -> bool:
    """Wait until the device has done all that is on its current stream. False if time ran out before.

    What is on a stream may wait for a peer that never comes, so the host waits here and nowhere else.
    """
    if not has_streams(device.type):
        if hasattr(module_of(device), "synchronize"):
            module_of(device).synchronize()
        return True
    event = module_of(device).Event()
    event.record(stream_of(device))
    began = time.monotonic()
    nap = 0.0
    while not event.query():
        if deadline.expired:
            return bool(event.query())
        if time.monotonic() - began > _SPIN_SECONDS:
            nap = min(_MAX_NAP_SECONDS, nap * 2 or 2e-5)
        time.sleep(nap)
    return True
