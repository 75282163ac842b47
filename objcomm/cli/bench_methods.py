"""What ``python -m objcomm bench`` compares: objcomm by two ways, torch's call, mpi4py, and the floor under all."""

from __future__ import annotations

import ctypes
import importlib.util
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import objcomm

from .bench_start import Ranks
from .payloads import Payload, as_numpy

# By what the command line calls them: the heading of a column, and what it is.
METHODS = {
    "objcomm": ("objcomm", "objcomm, as it comes"),
    "gloo": ("over gloo", "objcomm over gloo alone, without its transport within a host"),
    "torch": ("send_object_list", "torch.distributed.send_object_list and recv_object_list, over gloo"),
    "raw": ("raw bytes", "as many bytes by the gloo backend, between memory that was used before"),
    "mpi4py": ("mpi4py", "mpi4py.util.pkl5, the object's tensors as numpy arrays"),
    "mpi4py-torch": ("mpi4py torch", "mpi4py.util.pkl5, the object as it is"),
    "memcpy": ("memcpy", "one memcpy of as many bytes on one rank, between memory that was used before"),
}
_TAG = 3


def told(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class Method:
    """How one rank sends the object of a payload to the other and receives it.

    Attributes:
        one_way: it does not come back, so all of its time is that of one way; rank 0 alone is measured.
    """

    name: str
    send: Callable[[], Any]
    receive: Callable[[], Any]
    one_way: bool = False


class Bench:
    """The two ranks, and all that the methods need of them for the whole run."""

    def __init__(self, ranks: Ranks, names: Sequence[str], timeout: float) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.peer = 1 - self.rank
        # What the ranks agree on goes its own way, so that it works whatever has become of a method.
        self.control = dist.new_group([0, 1])
        self._over_gloo = dist.new_group([0, 1])
        wanted = objcomm.settings().local_transport
        objcomm.configure(local_transport=False)
        for group in (self.control, self._over_gloo):
            objcomm.exchange_objects(None, self.peer, group=group)
        objcomm.configure(local_transport=wanted)
        objcomm.exchange_objects(None, self.peer)
        self.one_host = self.exchange(socket.gethostname()) == socket.gethostname()
        self.left_out = {name: reason for name in names if (reason := self._why_not(name)) is not None}
        self.names = [name for name in METHODS if name in names and name not in self.left_out]

    def _why_not(self, name: str) -> str | None:
        if name == "torch" and importlib.util.find_spec("numpy") is None:
            return "torch's object calls need numpy"
        if name == "mpi4py" and importlib.util.find_spec("numpy") is None:
            return "numpy is not installed"
        return self.ranks.without_mpi if name.startswith("mpi4py") and self.ranks.mpi is None else None

    def barrier(self) -> None:
        self.ranks.limit(2 * self.timeout)
        dist.barrier(self.control)

    def tell(self, value: int) -> int:
        """``value`` of rank 0, on both ranks."""
        box = torch.tensor([value])
        dist.broadcast(box, 0, self.control)
        return int(box)

    def exchange(self, obj: Any) -> Any:
        """What the other rank gives here."""
        self.ranks.limit(2 * self.timeout)
        return objcomm.exchange_objects(obj, self.peer, group=self.control)

    def agree(self, obj: Any) -> Any:
        """What rank 0 gives here, on both ranks."""
        theirs = self.exchange(obj)
        return obj if self.rank == 0 else theirs

    def methods(self, payload: Payload, obj: Any, nbytes: int, names: Sequence[str]) -> dict[str, Method | str]:
        """The methods for one object of ``nbytes``, or why one cannot send it."""
        found: dict[str, Method | str] = {}
        for name in self.names:
            if name in names:
                try:
                    found[name] = getattr(self, "_" + name.replace("-", "_"))(payload, obj, nbytes)
                except Exception as error:
                    found[name] = told(error)
        return found

    def _objcomm(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        peer = self.peer
        return Method("objcomm", lambda: objcomm.send_object(obj, peer), lambda: objcomm.recv_object(peer))

    def _gloo(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        peer, group = self.peer, self._over_gloo
        return Method(
            "gloo",
            lambda: objcomm.send_object(obj, peer, group=group),
            lambda: objcomm.recv_object(peer, group=group),
        )

    def _torch(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        if payload.foreign:
            pickle.loads(pickle.dumps(obj))
        peer = self.peer

        def receive() -> Any:
            box = [None]
            dist.recv_object_list(box, peer)
            return box[0]

        return Method("torch", lambda: dist.send_object_list([obj], peer), receive)

    def _raw(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        group: Any = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        memory = [torch.ones(nbytes, dtype=torch.uint8)]
        peer = self.peer
        return Method(
            "raw", lambda: backend.send(memory, peer, _TAG).wait(), lambda: backend.recv(memory, peer, _TAG).wait()
        )

    def _mpi4py(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        return self._over_mpi("mpi4py", payload, as_numpy(obj))

    def _mpi4py_torch(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        return self._over_mpi("mpi4py-torch", payload, obj)

    def _over_mpi(self, name: str, payload: Payload, obj: Any) -> Method:
        if payload.foreign:
            pickle.loads(pickle.dumps(obj, protocol=5))
        mpi, peer = self.ranks.mpi, self.peer
        return Method(name, lambda: mpi.send(obj, peer), lambda: mpi.recv(source=peer))

    def _memcpy(self, payload: Payload, obj: Any, nbytes: int) -> Method:
        # Rank 1 has nothing to do, and waits.
        if self.rank != 0:
            return Method("memcpy", lambda: None, lambda: None, one_way=True)
        source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        move, there, here = ctypes.memmove, target.data_ptr(), source.data_ptr()
        # The tensors live as long as what points into them.
        return Method("memcpy", lambda: move(there, here, nbytes), lambda: (source, target), one_way=True)
