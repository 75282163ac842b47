"""The exact lane: any backend but gloo. It has no tags, needs equal sizes, and keeps the order of posting.

Such a backend runs the operations of two ranks on one communicator one after the other, whatever their
directions: two ranks that both send before they receive would wait for each other for ever. So each direction
has a communicator of its own, which nobody but objcomm uses.

Making communicators takes both ends, and a call that only posts must not wait for the other end. So the first
operation starts a thread that meets the peer in the group's store and opens both communicators, in the same
order on both ends; until that is done, operations queue up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..deadline import Deadline
from ..errors import ObjcommError, PeerError, TransferTimeout, UsageError
from . import accelerators, communicators, groups
from .base import Pending, messages

_MAX_POLL_SECONDS = 0.05
# How long a process that ends waits for its device to have sent what it was told to.
_FLUSH_SECONDS = 30.0
_LAST_SECONDS = 1.0


class ExactLane:
    """Both directions between this rank and one peer of a group, over its backend for a kind of device."""

    def __init__(self, group: dist.ProcessGroup, backend: str, kind: str, peer_group_rank: int, timeout: float) -> None:
        self.has_streams = accelerators.has_streams(kind)
        self._kind = kind
        self._bound = accelerators.bound_to(group)
        self._backend = backend
        self._timeout = timeout
        self._peer = groups.global_rank(group, peer_group_rank)
        self._store = groups.store_of(group)
        low, high = sorted((group.rank(), peer_group_rank))
        self._name = f"objcomm/{kind}/{low}-{high}"
        self._global_ranks = (groups.global_rank(group, low), groups.global_rank(group, high))
        # This rank's rank in both communicators: the first carries what 0 sends, the second what 1 sends.
        self._side = 0 if group.rank() == low else 1
        self._communicators: list[Any] = []
        self._queue: list[_Transfer] = []
        self._lock = threading.Lock()
        self._started = False
        self._opening: threading.Thread | None = None
        self._until = 0.0
        self._open = threading.Event()  # or failed
        self._failure: ObjcommError | None = None
        weakref.finalize(group, _end_all, self._communicators).atexit = False
        _lanes.add(self)

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the lane works: one device for good. Found out late, so that no unused device is woken up."""
        if self._kind == "cpu":
            return torch.device("cpu")
        return accelerators.receiving(self._kind, self._bound)

    def send(self, tensor: torch.Tensor) -> Pending:
        return self._post([tensor], sending=True)

    def recv(self, tensor: torch.Tensor) -> Pending:
        return self._post([tensor], sending=False)

    def send_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._post(tensors, sending=True)

    def recv_all(self, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._post(tensors, sending=False)

    def close(self) -> None:
        self.fail(PeerError(f"this rank broke off its transfers with rank {self._peer}"))

    def fail(self, error: ObjcommError) -> ObjcommError:
        """End the lane for good and return ``error``. What is in flight fails at once if the backend can."""
        # Without the lock: who holds it may be what hangs.
        if self._failure is None:
            self._failure = error.kept()
            # On some backends this waits for the device.
            threading.Thread(target=_end_all, args=(self._communicators, True), daemon=True).start()
        self._open.set()
        return error

    def check(self) -> None:
        """Raise why the lane has ended, if it has."""
        if self._failure is not None:
            raise PeerError(f"the connection to rank {self._peer} is closed since: {self._failure.text}")

    def failure_of(self) -> ObjcommError:
        """An error for a transfer that was waiting when the lane ended."""
        if self._failure is None:
            return PeerError(f"the connection to rank {self._peer} was closed before this transfer began")
        return type(self._failure)(self._failure.text, hint=self._failure.hint)

    def await_open(self, deadline: Deadline) -> None:
        self._until = max(self._until, deadline.at)
        if not self._open.wait(deadline.remaining()):
            self.check()
            text = f"rank {self._peer} has not made contact within {deadline.seconds:g} s"
            raise self.fail(TransferTimeout(text))

    def launch(self, transfer: _Transfer) -> None:
        """Hand a transfer to its communicator. The lock is held, so the order is that of posting."""
        direction = self._side if transfer.sending else 1 - self._side
        with accelerators.on_stream(self.device, transfer.stream):
            transfer.works = communicators.post(
                self._communicators[direction], transfer.memory, sending=transfer.sending, peer=1 - self._side
            )

    def _post(self, tensors: Sequence[torch.Tensor], *, sending: bool) -> Pending:
        # Both ends know the sizes, so both leave out what is empty.
        transfer = _Transfer(self, [piece for piece in messages(tensors) if piece.numel()], sending=sending)
        if not transfer.memory:
            return transfer
        try:
            with self._lock:
                self.check()
                if self._open.is_set():
                    self.launch(transfer)
                    return transfer
                if not self._started:
                    self._check_openable()
                    self._started = True
                    self._until = Deadline(self._timeout).at
                    name = f"objcomm-open-{self._side}-{self._peer}"
                    self._opening = threading.Thread(target=self._open_both, name=name, daemon=True)
                    self._opening.start()
                self._queue.append(transfer)
        except RuntimeError as error:
            if isinstance(error, ObjcommError):
                raise
            raise self.fail(self.translated(error, None)) from error
        return transfer

    def _check_openable(self) -> None:
        if not communicators.can_open(self._backend):
            raise UsageError(
                f"no communicator of two ranks can be made for backend {self._backend!r}",
                hint="call objcomm.init_control() on all ranks right after making the group",
            )

    def _open_both(self) -> None:
        try:
            name = self._meet()
            deadline = Deadline(self._timeout)
            if self._kind != "cpu":
                accelerators.use_device(self.device)
            # On a stream of its own: this thread begins with the one on which the program may compute.
            with accelerators.on_stream(self.device, accelerators.new_stream(self.device)):
                for direction in (0, 1):
                    opened = communicators.open_communicator(
                        self._backend,
                        self._store,
                        f"{name}/{direction}",
                        self._side,
                        self._global_ranks,
                        self._timeout,
                    )
                    self._communicators.append(opened)
                    self._warm(direction, deadline)
            with self._lock:
                self.check()
                for transfer in self._queue:
                    self.launch(transfer)
                self._queue.clear()
                self._open.set()
        except Exception as error:
            if not isinstance(error, ObjcommError):
                what = f"no {self._backend} connection to rank {self._peer} could be opened"
                error = PeerError(f"{what}: {_first_line(error)}")
            self.fail(error)
            _end_all(self._communicators, abruptly=True)

    def _meet(self) -> str:
        """Wait until the peer opens its end as well, as long as somebody waits for the lane, or the time-out.

        By asking the store again and again, since one that waits serves nobody else meanwhile. Returns a name
        for what the two ends open, which no process has used before: a store may outlive the group, and so
        may what lies in it.
        """
        mine, other = (f"{self._name}/{side}" for side in (self._side, 1 - self._side))
        token = secrets.token_hex(8)
        self._store.set(mine, token)
        nap = 0.0005
        while not self._store.check([other]):
            self.check()
            if time.monotonic() > self._until:
                raise TransferTimeout(f"rank {self._peer} has not made contact within {self._timeout:g} s")
            time.sleep(nap)
            nap = min(_MAX_POLL_SECONDS, nap * 1.5)
        tokens = [token, self._store.get(other).decode()]
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(other)
        return f"{self._name}/{'-'.join(tokens if self._side == 0 else reversed(tokens))}"

    def _warm(self, direction: int, deadline: Deadline) -> None:
        """Move one byte: many backends connect only then."""
        byte = torch.empty(1, dtype=torch.uint8, device=self.device)
        transfer = _Transfer(self, [byte], sending=direction == self._side)
        self.launch(transfer)
        transfer.finish(deadline)
        if self.has_streams and not accelerators.reached(self.device, deadline):
            raise TransferTimeout(f"rank {self._peer} has not opened its {self._backend} connection in time")

    def flush(self, deadline: Deadline) -> None:
        """Wait until the device has sent what was waited for on the current stream."""
        if self.has_streams and self._open.is_set() and self._failure is None:
            accelerators.reached(self.device, deadline)

    def give_up_opening(self) -> None:
        """A thread that is inside a backend or a store when the interpreter ends takes the process down with it."""
        opening = self._opening
        if opening is not None and opening.is_alive():
            self.fail(PeerError(f"this process ended before rank {self._peer} made contact"))
            opening.join(_LAST_SECONDS)

    def translated(self, error: RuntimeError, deadline: Deadline | None) -> ObjcommError:
        """What the backend's error means."""
        text = _first_line(error)
        if deadline is not None and ("timed out" in text.lower() or "timeout" in text.lower()):
            return TransferTimeout(f"rank {self._peer} did not come within {deadline.seconds:g} s: {text}")
        return PeerError(f"the transfer with rank {self._peer} failed: {text}")


class _Transfer:
    """Messages posted together. Keeps alive the memory, which backends do not own."""

    __slots__ = ("_error", "_lane", "memory", "sending", "stream", "works")

    def __init__(self, lane: ExactLane, memory: list[torch.Tensor], *, sending: bool) -> None:
        self._lane = lane
        self.memory = memory
        self.sending = sending
        # A thread that launches this later does it as if on the caller's stream.
        self.stream = accelerators.stream_of(lane.device) if lane.has_streams else None
        self.works: list[Any] | None = None if memory else []
        self._error: ObjcommError | None = None

    def wait(self, deadline: Deadline) -> None:
        if self._error is not None:
            raise self._error
        try:
            if self.works is None:
                self._lane.await_open(deadline)
            self.finish(deadline)
        except ObjcommError as error:
            self._error = error
            raise
        except RuntimeError as error:
            self._error = self._lane.fail(self._lane.translated(error, deadline))
            raise self._error from error
        self.works, self.memory = [], []

    def finish(self, deadline: Deadline) -> None:
        """Wait for what was launched; on streams, only make the current one wait."""
        if self.works is None:
            raise self._lane.failure_of()
        for work in self.works:
            if work is None:
                continue
            done = work.wait() if self._lane.has_streams else work.wait(deadline.timedelta())
            if done is False:
                raise RuntimeError("the backend reports a failure without a reason")


def _first_line(error: Exception) -> str:
    """Torch's errors may go on for pages."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def _end_all(opened: list[Any], abruptly: bool = False) -> None:
    for communicator in list(opened):
        communicators.end(communicator, abruptly=abruptly)


_lanes: weakref.WeakSet[ExactLane] = weakref.WeakSet()


@atexit.register
def _flush() -> None:
    """A process that ends ends its device's work too, and a transfer that was waited for is only queued."""
    deadline = Deadline(_FLUSH_SECONDS)
    for lane in list(_lanes):
        with contextlib.suppress(RuntimeError):
            lane.flush(deadline)
        lane.give_up_opening()
