"""As much of mpi4py and of mpiexec as the benchmark needs, for two processes of one host, written into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

_MPI = """
import os
import pickle
import time
from multiprocessing.connection import Client, Listener

COMM_TYPE_SHARED = 1
_links = []


class Comm:
    def __init__(self, comm=None):
        self.rank, self.size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])

    def send(self, obj, dest):
        self._link().send_bytes(pickle.dumps(obj))

    def recv(self, source):
        return pickle.loads(self._link().recv_bytes())

    def bcast(self, obj):
        if self.rank:
            return self.recv(0)
        self.send(obj, 1)
        return obj

    def barrier(self):
        self.bcast(None)
        if self.rank:
            self.send(None, 0)
        else:
            self.recv(1)

    def Split_type(self, kind):
        return self

    def _link(self):
        if not _links:
            path = os.environ["FAKE_MPI"] + "/socket"
            if self.rank == 0:
                with Listener(path) as listener:
                    _links.append(listener.accept())
            while not _links:
                try:
                    _links.append(Client(path))
                except OSError:
                    time.sleep(0.01)
        return _links[0]


COMM_WORLD = Comm()
"""

_MPIEXEC = f"""#!{sys.executable}
import os, subprocess, sys
size = int(sys.argv[2])
ranks = [
    subprocess.Popen(sys.argv[3:], env={{**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": str(size)}})
    for rank in range(size)
]
sys.exit(max([abs(rank.wait()) for rank in ranks]))
"""


def install(folder: Path) -> dict[str, str]:
    """Write it, and return the environment in which it is found before any other.

    A real mpiexec beside the Python that runs is used in the place of this one, which is as good.
    """
    package = folder / "mpi4py"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(_MPI)
    (package / "util" / "__init__.py").write_text("")
    (package / "util" / "pkl5.py").write_text("from ..MPI import Comm as Intracomm\n")
    (folder / "mpiexec").write_text(_MPIEXEC)
    (folder / "mpiexec").chmod(0o755)
    return {"PYTHONPATH": str(folder), "FAKE_MPI": str(folder)}
