"""What this process does when: one file per rank, as the Chrome trace format has it, and ranges for torch.profiler.

Off, it costs one look at ``active`` per phase. On, every event is appended to the file by a write of its own, so that
the file of a rank that is killed lacks nothing but its closing bracket, which viewers of the format do not need.

Times are those of CLOCK_MONOTONIC, which processes of one host share; a file begins with what is needed to bring hosts
together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from .errors import UsageError

_log = logging.getLogger("objcomm")
_C: Any = torch._C
# Ends with its handle, at the latest; older torch has only the slower one.
_range: Any = getattr(_C._profiler, "_RecordFunctionFast", profiler.record_function)


class Recorder:
    """The file of this process. It is opened with the first event, when the rank is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: int | None = None
        self._over = False
        self._threads: set[int] = set()
        # A signal's handler may send something while this thread is here; each write is whole by itself.
        self._lock = threading.RLock()

    def add(self, rank: int, event: dict[str, Any]) -> None:
        """Append one event, with its process and thread filled in."""
        thread = threading.get_native_id()
        event.update(pid=rank, tid=thread)
        with self._lock:
            if self._over:
                return
            try:
                if self._file is None:
                    self._file = self._open(rank)
                if thread not in self._threads:
                    self._threads.add(thread)
                    self._write(_metadata(rank, thread, "thread_name", name=threading.current_thread().name))
                self._write(event)
            except OSError as error:
                # A full disk is no reason for a transfer to fail.
                self._over = True
                _log.warning("the trace in %s ends here: %s", self.folder, error)

    def close(self) -> None:
        with self._lock:
            self._over = True
            if self._file is not None:
                os.write(self._file, b"\n]\n")
                os.close(self._file)
                self._file = None

    def forget(self) -> None:
        """After a fork, in the child: the file is the parent's."""
        self._lock = threading.RLock()
        self._over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, rank: int) -> int:
        path = self.folder / f"rank-{rank}.json"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        host = socket.gethostname()
        clock = {"clock": clock_name(), "wall_us": time.time_ns() / 1e3, "ts": time.monotonic_ns() / 1e3}
        os.write(file, b"[\n" + _line(_metadata(rank, 0, "process_name", name=f"rank {rank} on {host}")))
        os.write(file, b",\n" + _line(_metadata(rank, 0, "process_sort_index", sort_index=rank)))
        os.write(file, b",\n" + _line(_metadata(rank, 0, "objcomm_clock", host=host, **clock)))
        return file

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        os.write(self._file, b",\n" + _line(event))


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def _metadata(rank: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def clock_name() -> str:
    """The same for two processes whose monotonic clocks are one: a kernel, and a time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}"
    with contextlib.suppress(OSError):
        boot += os.readlink("/proc/self/ns/time")
    return boot


# Whoever is about to begin a phase looks here first, and at profiler._is_profiler_enabled.
active: Recorder | None = None


class Span:
    """A phase that has begun: ``encode``, ``post``, ``wait``, ``wire`` or ``decode``."""

    __slots__ = ("_name", "_range", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._range = _range(f"objcomm.{name}")
        self._range.__enter__()
        self._start = time.monotonic_ns()

    def end(self, rank: int, **args: Any) -> None:
        """The phase is over; ``args`` are shown with it: ``peer``, ``channel``, ``bytes``, ``message``."""
        end = time.monotonic_ns()
        self._range.__exit__(None, None, None)
        recorder = active
        if recorder is not None:
            span = {"ph": "X", "cat": "objcomm", "name": self._name, "ts": self._start / 1e3}
            recorder.add(rank, {**span, "dur": (end - self._start) / 1e3, "args": args})


def instant(rank: int, name: str, **args: Any) -> None:
    """Something that happened, such as an error."""
    recorder = active
    if recorder is not None:
        event = {"ph": "i", "s": "t", "cat": "objcomm", "name": name, "ts": time.monotonic_ns() / 1e3}
        recorder.add(rank, {**event, "args": args})


def trace(path: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[None]:
    """Write what objcomm does in this process into a file ``rank-N.json`` in a folder.

    The files are Chrome traces, which Perfetto and ``chrome://tracing`` open; ``python -m objcomm trace merge`` joins
    those of all ranks into one, with their clocks aligned and an arrow from each send to its receive. The environment
    variable ``OBJCOMM_TRACE`` does the same from the first use of objcomm on.

    Args:
        path: the folder, which is made if it is not there; ``None`` ends the trace.

    Returns:
        A context manager that ends the trace, for those who want one; the trace has begun already.

    Raises:
        UsageError: the folder cannot be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, trace(folder):
    ...     pass  # objects that are sent and received here are in the trace
    """
    global active
    folder = None
    if path is not None:
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"no traces can be written to {folder}: {error}") from error
    before, active = active, Recorder(folder) if folder is not None else None
    if before is not None:
        before.close()
    return _until_left(active)


@contextlib.contextmanager
def _until_left(recorder: Recorder | None) -> Iterator[None]:
    try:
        yield
    finally:
        if recorder is not None and active is recorder:
            trace(None)


_asked = False


def begin_if_asked() -> None:
    """Begin the trace that ``OBJCOMM_TRACE`` asks for, once in a process."""
    global _asked
    if not _asked:
        _asked = True
        folder = os.environ.get("OBJCOMM_TRACE")
        if folder and active is None:
            trace(folder)


def _after_fork() -> None:
    global active
    if active is not None:
        active.forget()
        active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
