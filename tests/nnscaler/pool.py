"""Ranks that stay alive from test to test, since importing torch and nnScaler takes longer than most tests.

Each job gets a process group of its own. A job that fails on any rank ends them all, with what every rank said or, if
it hangs, with its stack, and the next job starts new ones.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

import objcomm

ROOT = Path(__file__).resolve().parents[2]


class JobFailure(AssertionError):
    """What went wrong, rank by rank."""


class Pool:
    """Ranks 0 .. n-1, as many as the largest job needs."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nnscaler-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: str,
        world_size: int,
        *args: Any,
        backend: str = "gloo",
        timeout: float = 60.0,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call ``function`` (``"package.module:name"``) with ``(rank, *args)`` on every rank; results by rank."""
        __tracebackhide__ = True
        while len(self._pipes) < world_size:
            self._start(len(self._pipes))
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        pipes = self._pipes[:world_size]
        for rank, pipe in enumerate(pipes):
            job = (function, rank, world_size, store.port, backend, timeout, env or {}, args)
            pipe.send_bytes(cloudpickle.dumps(job))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        pending = list(range(world_size))
        while pending:
            ready = wait([pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending:
                    failures[rank] = f"hangs\n{self._stack(rank)}"
                break
            for rank in [rank for rank in pending if pipes[rank] in ready]:
                pending.remove(rank)
                try:
                    good, value = cloudpickle.loads(pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    good, value = False, f"died\n{self._output(rank)}"
                    deadline = min(deadline, time.monotonic() + 3.0)
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + 3.0)
        if failures:
            text = "".join(f"rank {rank} {failures[rank]}\n" for rank in sorted(failures))
            # The process groups of a failed job may be in any state, and so may nnScaler's.
            self.close()
            raise JobFailure(text)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End every rank. The next job starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._pipes = [], []

    def remove(self) -> None:
        """End every rank, and remove all that they wrote."""
        self.close()
        shutil.rmtree(self._folder)

    def _start(self, rank: int) -> None:
        with Listener(str(self._folder / f"pipe-{rank}-{time.monotonic_ns()}")) as listener:
            path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
            environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", "from tests.nnscaler.pool import serve; serve()", str(listener.address)]
            with (self._folder / f"output-{rank}").open("wb") as output:
                process = subprocess.Popen(command, env=environment, cwd=self._folder, stdout=output, stderr=output)
            self._processes.append(process)
            self._pipes.append(listener.accept())

    def _output(self, rank: int) -> str:
        return (self._folder / f"output-{rank}").read_text(errors="replace")[-4000:]

    def _stack(self, rank: int) -> str:
        self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self._output(rank)


def serve() -> None:
    """The life of a rank."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    tempfile.tempdir = os.getcwd()  # the folder of the pool, which goes with it
    base = dict(os.environ)
    with Client(sys.argv[1]) as pipe:
        while True:
            try:
                function, rank, size, port, backend, timeout, env, args = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            os.environ.clear()
            os.environ.update(base)
            os.environ.update(env)
            for name, value in (
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", size),
                ("LOCAL_WORLD_SIZE", size),
                ("GROUP_RANK", 0),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", port),
                ("TORCHELASTIC_RUN_ID", "none"),  # nnScaler takes it as the sign of torchrun
            ):
                os.environ[name] = str(value)
            try:
                report = cloudpickle.dumps((True, _job(function, rank, size, port, backend, timeout, args)))
            except BaseException:
                report = cloudpickle.dumps((False, f"raised:\n{traceback.format_exc()}"))
            pipe.send_bytes(report)


def _job(function: str, rank: int, size: int, port: int, backend: str, timeout: float, args: Any) -> Any:
    if backend == "strict":
        importlib.import_module("tests.strict_backend")
    # What is told of the strict backend has to go over it, and not around it; all else goes as it does by default.
    objcomm.configure(local_transport=backend != "strict")
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(rank, *args)
    finally:
        device = sys.modules.get("nnscaler.runtime.device")
        if device is not None:
            device.uninit_device()  # it remembers the groups of this job
        dist.destroy_process_group()
