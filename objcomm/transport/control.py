"""The control side: gloo beside a group that has none, so that sizes need no trip over the accelerator."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..deadline import Deadline
from ..errors import PeerError, TransferTimeout, UsageError
from . import groups

_POLL_SECONDS = 0.002

_controls: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
_attempts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Groups in which this rank has posted something: the way that heads take is settled there.
_settled: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_lock = threading.Lock()


def init_control(group: dist.ProcessGroup | None = None) -> None:
    """Give a group without gloo, such as a pure NCCL group, a CPU side for heads and CPU tensors.

    Heads then tell sizes without a device synchronisation. A collective: every rank of the group calls it, at
    the same place, before its first objcomm call on that group. Does nothing where the group has gloo, and
    nothing when called again.

    Args:
        group: the group; ``None`` is the default group.

    Raises:
        UsageError: a rank has used objcomm on the group already; on all ranks.
        TransferTimeout: not every rank has called it within the group's time-out, naming those that have not.
        PeerError: the ranks could not connect.

    Example::

        torch.distributed.init_process_group("nccl")
        objcomm.init_control()
    """
    pg = groups.existing(group)
    with _lock:
        backends = groups.backends_of(pg)
        if groups.gloo_of(pg) is not None or pg in _controls or pg.size() == 1:
            return
        attempt = _attempts[pg] = _attempts.get(pg, 0) + 1
        store = dist.PrefixStore(f"objcomm/control/{attempt}", groups.store_of(pg))
        timeout = groups.timeout_of(pg, next(iter(backends)))
        try:
            _agree(pg, store, timeout)
            limit = timedelta(seconds=timeout)
            _controls[pg] = c10d.ProcessGroupGloo(dist.PrefixStore("gloo", store), pg.rank(), pg.size(), timeout=limit)
        except (UsageError, TransferTimeout):
            raise
        except RuntimeError as error:
            raise PeerError(f"the control side of the group could not be made: {error}", phase="handshake") from error


def control_of(group: dist.ProcessGroup) -> Any | None:
    """The gloo backend of the control side, if the group has one. From now on the answer must not change."""
    _settled.add(group)
    return _controls.get(group)


def _agree(group: dist.ProcessGroup, store: dist.Store, timeout: float) -> None:
    """Wait for all ranks, and make sure that none has settled on doing without."""
    rank = dist.get_rank()
    if group in _settled:
        store.set("refused", f"rank {rank} has used objcomm on this group before")
    store.set(f"here/{group.rank()}", "1")
    if store.add("arrived", 1) == group.size():
        store.set("all", "1")
    deadline = Deadline(timeout)
    while not store.check(["all"]):
        if deadline.expired:
            missing = [r for r in range(group.size()) if not store.check([f"here/{r}"])]
            names = ", ".join(str(groups.global_rank(group, r)) for r in missing)
            raise TransferTimeout(
                f"init_control() was not called by rank {names} within {timeout:g} s",
                rank=rank,
                phase="handshake",
                hint="it is a collective: every rank of the group calls it",
            )
        time.sleep(_POLL_SECONDS)
    if store.check(["refused"]):
        raise UsageError(
            f"init_control() comes too late: {store.get('refused').decode()}",
            rank=rank,
            hint="call it right after the group is made",
        )
