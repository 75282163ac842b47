"""Through the codec and back, with nothing in between."""

from __future__ import annotations

from typing import Any

import torch

from objcomm.codec import SEGMENT_THRESHOLD, Encoded, Plan, encode, parse
from objcomm.config import Trust

MAX_BYTES = 1 << 32


def plan_of(encoded: Encoded, *, trust: Trust = "cluster", skeleton: bytes | None = None) -> Plan:
    return parse(
        encoded.skeleton if skeleton is None else skeleton,
        inline_bytes=encoded.inline_bytes,
        segments=[(segment.numel(), segment.device.type != "cpu") for segment in encoded.segments],
        trust=trust,
        max_bytes=MAX_BYTES,
    )


def arrive(encoded: Encoded, *, trust: Trust = "cluster", skeleton: bytes | None = None) -> Any:
    plan = plan_of(encoded, trust=trust, skeleton=skeleton)
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    return plan.build(inline, [segment.clone() for segment in encoded.segments])


def loopback(obj: object, *, trust: Trust = "cluster", threshold: int = SEGMENT_THRESHOLD) -> Any:
    return arrive(encode(obj, trust=trust, threshold=threshold), trust=trust)
