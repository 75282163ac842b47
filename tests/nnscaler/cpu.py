"""nnScaler on a machine without a GPU: what it asks of torch.cuda at run time, answered for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def pretend() -> None:
    """Stub the functions of torch.cuda that nnScaler calls, in this process only."""
    cpu = torch.device("cpu")

    for name in ("set_device", "default_stream", "synchronize", "empty_cache"):
        # A function of its own for each: torch's compiler keeps a table of them by identity.
        setattr(torch.cuda, name, _nothing())
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda *args: (8, 0)
    torch.nn.Module.cuda = lambda module, device=None: module  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def _nothing() -> Callable[..., None]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing
