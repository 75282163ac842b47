"""Object <-> skeleton, inline area and segments. Knows nothing of ranks, groups or the devices of peers.

>>> sent = encode({"step": 3, "mask": torch.ones(4, dtype=torch.bool)})
>>> inline = torch.empty(sent.inline_bytes, dtype=torch.uint8)
>>> sent.write_inline(inline)
>>> plan = parse(sent.skeleton, inline_bytes=sent.inline_bytes, segments=[], max_bytes=1 << 20)
>>> plan.build(inline, [])
{'step': 3, 'mask': tensor([True, True, True, True])}
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import Trust

# From this size on a buffer is its own transfer; below it, copying it into one block with others is cheaper.
SEGMENT_THRESHOLD = 512 * 1024
