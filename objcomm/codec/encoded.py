"""An object that has been taken apart."""

from __future__ import annotations

import torch

from .memory import Memory


class Encoded:
    """An object that is ready to leave. It keeps alive all memory that it points into.

    Attributes:
        skeleton: all that is not memory of tensors, arrays and buffers.
        inline_bytes: size of the inline area.
        segments: flat contiguous uint8 tensors, each a transfer of its own.
        opaque: it holds at least one pickled leaf.
    """

    __slots__ = ("_memory", "inline_bytes", "opaque", "segments", "skeleton")

    def __init__(self, skeleton: bytes, memory: Memory | None = None, opaque: bool = False) -> None:
        self.skeleton = skeleton
        self.inline_bytes: int = 0 if memory is None else memory.inline_bytes
        self.segments: list[torch.Tensor] = [] if memory is None else memory.segments
        self.opaque = opaque
        self._memory = memory

    @classmethod
    def of_skeleton(cls, skeleton: bytes) -> Encoded:
        """What has no memory beside its skeleton; the skeleton need not be one of this codec."""
        return cls(skeleton)

    def write_inline(self, out: torch.Tensor) -> None:
        """Fill the inline area: a CPU uint8 tensor of ``inline_bytes`` elements."""
        if self._memory is not None:
            self._memory.write_inline(out)

    def write_inline_at(self, address: int) -> None:
        """The same at an address, which saves the making of a tensor: on the way of a small message that counts."""
        if self._memory is not None:
            self._memory.write_at(address)
