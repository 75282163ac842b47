"""Run a function on several real ranks, each a process of its own, and never leave one behind.

>>> run_ranks(lambda rank: rank + 1, 2)   # doctest: +SKIP
[1, 2]

A rank that raises fails the test with that rank's traceback; one that hangs fails it with the Python stack of
every rank that is still running; whatever happens, every process that was started has ended when
:func:`run_ranks` returns.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import inspect
import linecache
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
import torch.distributed as dist

# What a rank needs before its first line of test code. Imported once by the fork server, so that a rank
# starts in a tenth of a second. objcomm itself is left out: each rank imports it afresh, under its own
# environment.
_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "msgpack", "numpy", "pytest", "tests.ranks"]

# What cloudpickle calls the file of every function that it ships by value.
_DYNAMIC = "<dynamic-code>"

# After a rank has failed, its peers get this long to fail as well: theirs may be the more telling traceback.
_GRACE = 3.0
# A rank that has returned has this long to end, and one that was asked for its stack this long to write it.
_EXIT_GRACE = 15.0
_STACK_GRACE = 2.0


# What ranks use whose test does not say: see tests/conftest.py.
default_backend = "gloo"


class RankFailure(AssertionError):
    """What went wrong, rank by rank, tracebacks, stacks and output included."""


@dataclass(frozen=True)
class _Spec:
    """What one rank is told."""

    rank: int
    world_size: int
    backend: str | None
    port: int
    timeout: float
    group_timeout: float
    env: dict[str, str | None]
    folder: Path
    filters: list[Any]
    source: str
    body: bytes


@dataclass
class _Rank:
    """What the parent knows of one rank."""

    number: int
    process: Any
    pipe: Connection
    folder: Path
    source: str
    result: Any = None
    failures: list[str] = field(default_factory=list)

    def read(self, kind: str) -> str:
        path = self.folder / f"{kind}-{self.number}"
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def exit_text(self) -> str:
        code = self.process.exitcode
        killed = code is not None and code < 0
        return f"signal {signal.Signals(-code).name}" if killed else f"exit code {code}"

    def stack(self) -> str:
        """The Python stack of every thread of the rank, wherever it is blocked."""
        end = time.monotonic() + _STACK_GRACE
        os.kill(self.process.pid, signal.SIGUSR1)
        while time.monotonic() < end and self.process.is_alive():
            text = self.read("stack")
            if "(most recent call first)" in text:
                time.sleep(0.05)  # the handler writes line by line
                return self.read("stack").replace(_DYNAMIC, self.source)
            time.sleep(0.02)
        return "<no stack: the process did not answer>"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    backend: str | None = "",
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    env: Mapping[str, str | None] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``world_size`` new processes and return the results by rank.

    Args:
        fn: any function, closures included; it and its result travel by cloudpickle.
        backend: what torch.distributed is initialised with: ``"gloo"``, ``"strict"`` (see
            tests/strict_backend.py), a string like ``"cpu:gloo,cuda:nccl"``; ``None`` leaves it to ``fn``
            (the environment is that of torchrun). objcomm's transport within a host is off, except for
            ``"local"``, which is gloo with it, and ``"local strict"``. By default ``default_backend``.
        timeout: seconds that all of it may take; past them the run fails with the ranks' stacks.
        group_timeout: seconds, the time-out of the default process group.
        env: variables to set in the ranks; ``None`` as a value removes one.
        may_die: ranks that may end without a result (``os._exit``, a signal): their result is then ``None``.

    Raises:
        RankFailure: a rank raised, died, hung, or did not end after its function had returned.
    """
    __tracebackhide__ = True
    ranks: list[_Rank] = []
    kind = default_backend if backend == "" else backend
    local = "local" in (kind if kind is not None else default_backend)
    if kind is not None and local:
        kind = kind.removeprefix("local").strip() or "gloo"
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        common = _Spec(
            rank=0,
            world_size=world_size,
            backend=kind,
            port=store.port,
            timeout=timeout,
            group_timeout=group_timeout,
            env={"OBJCOMM_LOCAL_TRANSPORT": None if local else "0", **(env or {})},
            folder=Path(name),
            filters=list(warnings.filters),
            source=inspect.getsourcefile(fn) or _DYNAMIC,
            body=cloudpickle.dumps((fn, args)),
        )
        try:
            for rank in range(world_size):
                ranks.append(_start(replace(common, rank=rank)))
            failures = _watch(ranks, time.monotonic() + timeout, timeout, may_die)
        finally:
            for one in ranks:
                _end(one)
            del store
        printed = [(r.number, r.read("output")) for r in ranks]
    output = "".join(f"--- output of rank {number}\n{text}\n" for number, text in printed if text)
    if failures:
        raise RankFailure(failures + output)
    if output:
        print(output, end="")
    return [r.result for r in ranks]


def _start(spec: _Spec) -> _Rank:
    context = _context()
    here, there = context.Pipe()
    told = cloudpickle.dumps(replace(spec, env=_environment(spec)))
    process = context.Process(target=_rank_main, args=(told, there), name=f"rank-{spec.rank}")
    process.start()
    there.close()
    return _Rank(spec.rank, process, here, spec.folder, spec.source)


def _environment(spec: _Spec) -> dict[str, str | None]:
    """That of this process, with what torchrun would add and what the test wants on top."""
    env: dict[str, str | None] = dict(os.environ)
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec.port), WORLD_SIZE=str(spec.world_size))
    # Somebody else runs the store, as torchrun's agent does.
    env.update(RANK=str(spec.rank), LOCAL_RANK=str(spec.rank), TORCHELASTIC_USE_AGENT_STORE="True")
    return {**env, **spec.env}


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _watch(ranks: list[_Rank], deadline: float, timeout: float, may_die: Collection[int]) -> str:
    """Collect every rank's report, let all go together, and see them end. Returns what failed, or nothing."""
    waiting = list(ranks)
    failed: list[_Rank] = []
    while waiting:
        ready = wait([r.pipe for r in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for one in [r for r in waiting if r.pipe in ready]:
            waiting.remove(one)
            _receive(one, may_die)
            if one.failures:
                failed.append(one)
                deadline = min(deadline, time.monotonic() + _GRACE)
    if waiting:
        reason = "still running when it was ended" if failed else f"hangs: still running after {timeout:g} s"
        for one in waiting:
            one.failures.append(f"{reason}\n{one.stack()}\n")
        failed.extend(waiting)
    if not failed:
        # Only now may any rank take its connections down: a peer could still have been reading from them.
        for one in ranks:
            _release(one)
        failed.extend(one for one in ranks if not _ended_well(one, may_die))
    return "".join(f"rank {one.number} {text}" for one in failed for text in one.failures)


def _receive(one: _Rank, may_die: Collection[int]) -> None:
    try:
        good, report = cloudpickle.loads(one.pipe.recv_bytes())
    except (EOFError, OSError):
        one.process.join(_EXIT_GRACE)
        if one.number not in may_die:
            one.failures.append(f"died without a result: {one.exit_text()}\n")
        return
    except Exception:
        one.failures.append(f"returned what cannot be unpickled here:\n{traceback.format_exc()}")
        return
    if good:
        one.result = report
    else:
        one.failures.append(f"raised:\n{report}")


def _release(one: _Rank) -> None:
    try:
        one.pipe.send_bytes(b"go")
    except OSError:
        return  # it is gone already, which _ended_well judges


def _ended_well(one: _Rank, may_die: Collection[int]) -> bool:
    one.process.join(_EXIT_GRACE)
    if one.process.is_alive():
        one.failures.append(f"returned from its function but did not end\n{one.stack()}\n")
    elif one.process.exitcode != 0 and one.number not in may_die:
        one.failures.append(f"returned from its function, then ended with {one.exit_text()}\n")
    return not one.failures


def _end(one: _Rank) -> None:
    if one.process.is_alive():
        one.process.kill()
    one.process.join()
    one.process.close()
    one.pipe.close()


def _rank_main(packed: bytes, pipe: Connection) -> None:
    """The life of a rank, in its own process."""
    spec: _Spec = cloudpickle.loads(packed)
    output = os.open(spec.folder / f"output-{spec.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    cast(Any, sys.stdout).reconfigure(line_buffering=True)  # a rank that is killed has shown what it printed
    faulthandler.enable(file=2)
    stack = open(spec.folder / f"stack-{spec.rank}", "w")  # noqa: SIM115 -- open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    # Should the parent be killed, nobody else would end this process.
    faulthandler.dump_traceback_later(spec.timeout + 2 * _EXIT_GRACE, exit=True, file=2)
    os.environ.clear()
    os.environ.update({name: value for name, value in spec.env.items() if value is not None})
    warnings.resetwarnings()
    cast("list[Any]", warnings.filters).extend(spec.filters)
    torch.set_num_threads(1)
    try:
        message = cloudpickle.dumps((True, _call(spec)))
    except BaseException as error:
        trace = error.__traceback__
        # The frames of this file say nothing about the test.
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        pipe.send_bytes(cloudpickle.dumps((False, text.replace(_DYNAMIC, spec.source))))
        sys.exit(1)
    pipe.send_bytes(message)
    if pipe.recv_bytes() == b"go" and dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # a child of multiprocessing skips these; a real rank does not


def _call(spec: _Spec) -> Any:
    lines = linecache.getlines(spec.source)
    linecache.cache[_DYNAMIC] = (0, None, lines, spec.source)  # so that tracebacks show them
    fn, args = cloudpickle.loads(spec.body)
    if spec.backend is not None:
        if re.search(r"\bstrict\b", spec.backend):
            importlib.import_module("tests.strict_backend")
        patience = timedelta(seconds=spec.timeout)
        store = dist.TCPStore("127.0.0.1", spec.port, None, is_master=False, timeout=patience)
        dist.init_process_group(
            spec.backend,
            store=store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.group_timeout),
        )
    return fn(spec.rank, *args)
