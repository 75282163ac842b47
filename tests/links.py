"""What the tests of every kind of link use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from objcomm.errors import ObjcommError
from objcomm.transport import Link, link, resolve


def link_to(rank: int, group: dist.ProcessGroup | None = None) -> Link:
    peer = resolve(group, rank, None, "peer")
    return link(peer.group, peer.group_rank)


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def error_of(call: Any) -> ObjcommError:
    with pytest.raises(ObjcommError) as caught:
        call()
    return caught.value
