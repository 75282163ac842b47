"""What depends on the kind of accelerator: its current device, its streams, memory that it copies from by itself."""

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
# Most waits for a device end within the spin; past it the interpreter is left to others for longer and longer.
_SPIN_SECONDS = 0.0002
_MAX_NAP_SECONDS = 0.001


def module_of(device: torch.device) -> Any:
    """``torch.cuda`` and its like; ``None`` for a device that has no such module."""
    return getattr(torch, device.type, None)


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is queued on streams, so that waiting for it is not the host's business."""
    module = module_of(device)
    return device.type != "cpu" and all(hasattr(module, name) for name in ("current_stream", "stream", "Event"))


def current_of(kind: str) -> torch.device:
    """The current device of a kind."""
    module = module_of(torch.device(kind))
    index = module.current_device() if hasattr(module, "current_device") else 0
    return torch.device(kind, index)


def current() -> torch.device | None:
    """This process's accelerator, with the index of the current device; ``None`` if there is none."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return current_of("cuda") if torch.cuda.is_available() else None
    device = torch.accelerator.current_accelerator()
    return None if device is None or not torch.accelerator.is_available() else current_of(device.type)


def bound_to(group: dist.ProcessGroup) -> torch.device | None:
    """The device that the group was bound to when it was made."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    return bound


def stream_of(device: torch.device) -> Any:
    """The current stream; ``None`` where there are none."""
    return module_of(device).current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device) -> Any:
    """A stream of one's own; ``None`` where there are none."""
    return module_of(device).Stream(device) if has_streams(device) else None


def on_stream(device: torch.device, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make ``stream`` the current one of this thread, and its device the current device."""
    return contextlib.nullcontext() if stream is None else module_of(device).stream(stream)


def use_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread: a new thread would begin on the first, and wake it up."""
    module = module_of(device)
    if hasattr(module, "set_device"):
        module.set_device(device)


def pinned(nbytes: int) -> torch.Tensor:
    """CPU memory, flat uint8, that an accelerator copies to and from without the host, where that can be had.

    Torch's allocator hands it out again only when the copies that were queued are over.
    """
    if 0 < nbytes <= _MAX_PINNED_BYTES:
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return hugepages.empty(nbytes)


def reached(device: torch.device, deadline: Deadline) -> bool:
    """Wait until the device has done all that is on its current stream. False if time ran out before.

    This is the one place where the host waits for a device that waits for a peer, so it never waits for ever.
    """
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


def synchronize(device: torch.device) -> None:
    """Wait for this rank's own work on the current stream."""
    stream = stream_of(device)
    if stream is not None:
        stream.synchronize()
    elif hasattr(module_of(device), "synchronize"):
        module_of(device).synchronize()
