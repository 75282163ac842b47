"""The two ranks of ``python -m objcomm bench``: of torchrun, of mpiexec, or started here, by mpiexec where it works.

mpi4py can only be measured between processes that an MPI launcher has started. Those are ranks of a gloo group at the
same time, so that all methods take their turns between the same two processes.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from . import launch

# Of the MPI launchers: MPICH and all with its PMI, those with PMIx, Open MPI.
_MPI_RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_WHY_NOT = "OBJCOMM_BENCH_NO_MPI"
_TERMINAL = "OBJCOMM_BENCH_TERMINAL"
# In one write: what two ranks print arrives mixed.
_PROBE = "import os; from mpi4py import MPI; from mpi4py.util import pkl5; os.write(1, b'<%d>' % MPI.COMM_WORLD.size)"
_PROBE_SECONDS = 30.0
_END_SECONDS = 5.0


class Ranks:
    """This process as one of the ranks.

    Attributes:
        mpi: mpi4py's communicator of all ranks, with pickle protocol 5; ``None`` where there is none.
        without_mpi: why there is none.
        started_by: who started the ranks.
    """

    def __init__(self, mpi: Any, without_mpi: str, started_by: str, store: dist.Store | None = None) -> None:
        self.mpi = mpi
        self.without_mpi = without_mpi
        self.started_by = started_by
        self._store = store

    def limit(self, seconds: float) -> None:
        """End this process if it does not come here again in time. Nothing else ends a receive of MPI."""
        if self.mpi is not None:
            faulthandler.dump_traceback_later(seconds, exit=True)

    def leave(self) -> None:
        """All is well: go when the others go."""
        if self.mpi is not None:
            self.mpi.barrier()
            faulthandler.cancel_dump_traceback_later()

    def fail(self) -> None:
        """Something is not: MPI would wait for the others before it lets this process end."""
        if self.mpi is not None:
            _end(1)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_rank() -> bool:
    """Whether somebody has started this process as a rank."""
    return launch.world_size() is not None or (any(name in os.environ for name in _MPI_RANK) and _mpi_size() > 1)


def world_size() -> int:
    """How many ranks there are, in a rank."""
    size = launch.world_size()
    return _mpi_size() if size is None else size


def rank() -> int:
    """The number of this rank."""
    names = ("RANK", *_MPI_RANK) if launch.world_size() is not None else _MPI_RANK
    return int(next(os.environ[name] for name in names if name in os.environ))


def pin(rank: int) -> None:
    """One core a rank: on a busy machine the scheduler's moves cost more than a small message does.

    It holds for the threads that are started later.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def live() -> bool:
    """Whether what a rank prints comes to a terminal, as whoever started it has seen."""
    return os.environ.get(_TERMINAL) == "1"


def start(arguments: Sequence[str], *, mpi: bool, terminal: bool) -> int:
    """Run ``python -m objcomm ARGUMENTS`` on two ranks, and return the status.

    Args:
        arguments: of the command.
        mpi: try to start them by mpiexec.
        terminal: what rank 0 prints is for a terminal, even if it goes through mpiexec.
    """
    os.environ[_TERMINAL] = str(int(terminal))
    os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    reason = _why_not_mpi() if mpi else "it was not asked for"
    if reason is not None:
        os.environ[_WHY_NOT] = reason
        return launch.start_ranks(arguments)
    process = subprocess.Popen([*_mpiexec(), sys.executable, "-m", "objcomm", *arguments])
    try:
        return abs(process.wait())
    except KeyboardInterrupt:
        return 130
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _mpiexec() -> list[str]:
    """The launcher beside this Python comes first: it belongs to the library that was installed with mpi4py."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return [] if found is None else [found, "-n", str(launch.RANKS)]


def _why_not_mpi() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    command = _mpiexec()
    if not command:
        return "there is no mpiexec"
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"mpiexec does not work: {error}"
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        return f"mpiexec does not work: {last}"
    if done.stdout.count(f"<{launch.RANKS}>") != launch.RANKS:
        return f"{command[0]} does not belong to the MPI library that mpi4py uses"
    return None


def _mpi_size() -> int:
    if importlib.util.find_spec("mpi4py") is None:
        return 0
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return int(MPI.COMM_WORLD.size)


def join(timeout: float) -> Ranks:
    """Make this process a rank of a gloo group.

    Raises:
        RuntimeError: the ranks did not come together within ``timeout`` seconds.
    """
    patience = timedelta(seconds=timeout)
    if launch.world_size() is not None:
        dist.init_process_group("gloo", timeout=patience)
        reason = os.environ.get(_WHY_NOT)
        if reason is not None:
            return Ranks(None, reason, "objcomm")
        return Ranks(None, "it needs ranks that mpiexec has started, not torchrun", "torchrun")
    from mpi4py import MPI
    from mpi4py.util import pkl5

    world = pkl5.Intracomm(MPI.COMM_WORLD)
    ranks = Ranks(world, "", "mpiexec")
    ranks.limit(timeout)
    one_host = world.Split_type(MPI.COMM_TYPE_SHARED).size == world.size
    host = "127.0.0.1" if one_host else socket.gethostname()
    if one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world.rank == 0:
        ranks._store = dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=patience)
        world.bcast((host, ranks._store.port))
    else:
        host, port = world.bcast(None)
        ranks._store = dist.TCPStore(host, port, None, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=ranks._store, rank=world.rank, world_size=world.size, timeout=patience)
    return ranks
