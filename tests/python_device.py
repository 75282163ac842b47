"""An accelerator written in Python, for the ways that only accelerators take: CPU memory in disguise.

It does just what moving flat bytes needs. With ``streams=True`` it has streams and events that are over at
once, and counts how often the host waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils import backend_registration

NAME = "pydev"


class Waits:
    """How often the host has waited for the device."""

    count = 0

    @classmethod
    def take(cls) -> int:
        """The number since the last call."""
        count, cls.count = cls.count, 0
        return count


class DeviceTensor(torch.Tensor):
    """Torch takes it for a tensor of the device; ``memory`` has the bytes."""

    memory: torch.Tensor

    @staticmethod
    def over(memory: torch.Tensor) -> DeviceTensor:
        made: Any = torch._C._acc.create_empty_tensor(memory.shape, memory.dtype)
        made.__class__ = DeviceTensor
        made.memory = memory
        return cast(DeviceTensor, made)


class _Module:
    """What ``torch.pydev`` is."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


class _ModuleWithStreams(_Module):
    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            pass

        def synchronize(self) -> None:
            Waits.count += 1

    class Event:
        def record(self, stream: Any) -> None:
            pass

        def query(self) -> bool:
            Waits.count += 1
            return True

    def __init__(self) -> None:
        self._stream = self.Stream()

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self._stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before


def install(*, streams: bool) -> None:
    """Make the device known to this process. Not undone: call it in a process of its own."""
    module = _ModuleWithStreams() if streams else _Module()
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    _kept.append(library)

    def empty(size: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        return DeviceTensor.over(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        return DeviceTensor.over(torch.empty(size, dtype=dtype))

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        getattr(target, "memory", target).copy_(getattr(source, "memory", source))
        return target

    def slice_(tensor: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> torch.Tensor:
        return DeviceTensor.over(torch.ops.aten.slice.Tensor(tensor.memory, dim, start, end, step))

    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("_copy_from", copy_from)
    library.impl("slice.Tensor", slice_)


# The operators live as long as the library that registered them.
_kept: list[torch.library.Library] = []
