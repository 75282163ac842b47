"""What the figures of a benchmark belong to: the machine, and the versions of all that takes part."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import objcomm

from . import facts

_PEERS = ("numpy", "mpi4py", "mpich", "openmpi")


def machine() -> dict[str, Any]:
    """Facts as JSON takes them; none of them says whose machine it is."""
    return {
        "processor": _first(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "huge_pages": facts.of_this_rank(0)["huge_pages"],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "objcomm": objcomm.__version__,
        **{name: version for name in _PEERS if (version := _version(name)) is not None},
    }


def in_a_line(found: dict[str, Any]) -> str:
    """The same for a person.

    >>> in_a_line({"usable_cores": 2, "processor": "a CPU", "torch": "2.9", "python": "3.11", "objcomm": "0.1"})
    '2 cores, a CPU; torch 2.9, Python 3.11, objcomm 0.1'
    """
    cores = f"{found['usable_cores']} core{'s' * (found['usable_cores'] != 1)}"
    versions = f"torch {found['torch']}, Python {found['python']}, objcomm {found['objcomm']}"
    return f"{cores}, {found['processor']}; {versions}"


def _first(pattern: str, path: Path) -> str | None:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def _memory() -> int | None:
    kibibytes = _first(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo"))
    return int(kibibytes) * 1024 if kibibytes else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
