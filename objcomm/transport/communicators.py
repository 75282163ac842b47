"""New communicators of two ranks, for any backend that torch.distributed knows.

``torch.distributed.new_group`` would not do. The name that it gives a group of a few ranks depends on how
many groups each of them has made, so two ranks that have talked to different numbers of peers would wait for
each other under different names; groups that the program makes later would suffer the same. And on a group
that is bound to a device it splits the parent's communicator, for which all of the parent's ranks are needed.
So the backend is made here, under a name that both ends know.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Those that torch itself ships and that take (store, rank, size, options).
_WITH_OPTIONS = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}


def can_open(backend: str) -> bool:
    """Whether a communicator of two ranks can be made for this backend."""
    if backend.upper() in dist.Backend._plugins or backend == "ucc":
        return True
    return backend in _WITH_OPTIONS and hasattr(c10d, _WITH_OPTIONS[backend])


def open_communicator(
    backend: str, store: dist.Store, name: str, rank: int, global_ranks: tuple[int, int], timeout: float
) -> Any:
    """Make this rank's end, ``rank`` being 0 or 1. Not all backends wait for the other end here."""
    store = dist.PrefixStore(name, store)
    limit = timedelta(seconds=timeout)
    if backend in _WITH_OPTIONS:
        kind = getattr(c10d, _WITH_OPTIONS[backend])
        options = kind.Options()
        options._timeout = limit
        options.global_ranks_in_group = list(global_ranks)
        options.group_name = name
        made = kind(store, rank, 2, options)
        made._set_sequence_number_for_group()
        return made
    if backend == "ucc":
        return c10d.ProcessGroupUCC(store, rank, 2, timeout=limit)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, 2, limit)
    description = c10d._DistributedBackendOptions()
    description.store = store
    description.group_rank = rank
    description.group_size = 2
    description.timeout = limit
    description.group_id = name
    description.global_ranks_in_group = list(global_ranks)
    return plugin.creator_fn(description, None)


def post(communicator: Any, tensors: list[torch.Tensor], *, sending: bool, peer: int) -> list[Any]:
    """Post sends or receives, as one batch where the backend has batches. Returns what is to be waited for.

    A batch even of one: NCCL takes batches and single operations over different communicators, and the other
    end may cut the same tensors into other batches.
    """
    call = communicator.send if sending else communicator.recv
    if not getattr(communicator, "supports_coalescing", type(communicator).__name__ == "ProcessGroupNCCL"):
        return [call([tensor], peer, 0) for tensor in tensors]
    # A group written in Python has the signature of a group here, everything else that of a backend.
    device = (tensors[0].device,) if isinstance(communicator, dist.ProcessGroup) else ()
    communicator._start_coalescing(*device)
    try:
        for tensor in tensors:
            call([tensor], peer, 0)
    finally:
        work = communicator._end_coalescing(*device)
    return [work]


def end(communicator: Any, *, abruptly: bool) -> None:
    """Free a communicator: after what is in flight, or at once. Never raises."""
    for name in ("abort", "_abort") if abruptly else ("shutdown", "_shutdown"):
        method = getattr(communicator, name, None)
        if method is not None:
            with contextlib.suppress(Exception):
                method()
            return
