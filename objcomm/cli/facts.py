"""What the doctor knows of one rank, and what it makes of all of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

import objcomm
from objcomm.wire.frame import VERSION

Verdict = Literal["ok", "note", "FAIL"]
_PACKAGES = ("torch", "msgpack", "cloudpickle", "numpy")
_BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NNSCALER_SECONDS = 120.0


class Check(NamedTuple):
    """One line of the doctor's table. A ``note`` is worth knowing, and no reason to fail."""

    verdict: Verdict
    name: str
    text: str


def of_this_rank(rank: int) -> dict[str, Any]:
    """Facts as JSON takes them."""
    try:
        settings: dict[str, Any] = vars(objcomm.settings())
        wrong = None
    except objcomm.UsageError as error:
        settings, wrong = {}, str(error)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "objcomm": objcomm.__version__,
        "protocol": VERSION,
        "packages": {name: _version(name) for name in _PACKAGES},
        "backends": [name for name in _BACKENDS if dist.is_backend_available(name)],
        "accelerator": _accelerator(),
        "settings": settings,
        "settings_error": wrong,
        "huge_pages": _huge_pages(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "loopback": _name_is_loopback(),
    }


def judge(ranks: Sequence[Mapping[str, Any]], missing: Sequence[int], nnscaler: Check) -> list[Check]:
    """What the facts of all ranks say; ``missing`` are ranks that have not told theirs."""
    hosts = {one["host"] for one in ranks}
    checks = [
        _same(ranks, "objcomm", lambda one: f"{one['objcomm']}, protocol {one['protocol']}", "FAIL"),
        _same(ranks, "Python", lambda one: f"{one['python']}, {one['system']}", "note"),
        *(_same(ranks, name, lambda one, name=name: one["packages"][name], "note") for name in _PACKAGES),
        _same(ranks, "backends", lambda one: ", ".join(one["backends"]) or "none", "note"),
        _same(ranks, "accelerators", lambda one: one["accelerator"] or "none: everything stays on the CPU", "note"),
        *_settings(ranks),
        _pages(ranks),
        *_network(ranks, len(hosts)),
        nnscaler,
    ]
    if missing:
        checks.insert(0, Check("FAIL", "ranks", f"nothing was heard of rank {short(missing)}"))
    return checks


def _same(ranks: Sequence[Mapping[str, Any]], name: str, tell: Any, otherwise: Verdict) -> Check:
    """A fact that should be the same on all ranks."""
    told: dict[str, list[int]] = {}
    for one in ranks:
        told.setdefault(str(tell(one) or "not installed"), []).append(one["rank"])
    if len(told) == 1:
        return Check("ok", name, next(iter(told)))
    return Check(otherwise, name, "; ".join(f"{text} on rank {short(where)}" for text, where in told.items()))


def _settings(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    wrong = [one for one in ranks if one["settings_error"]]
    if wrong:
        return [_same(wrong, "settings", lambda one: one["settings_error"], "FAIL")._replace(verdict="FAIL")]
    # Both ends of a pair must have the same limit; a receiver's trust is its own business.
    checks = [_same(ranks, "max_bytes", lambda one: f"{one['settings']['max_bytes']:,}", "FAIL")]
    for name in ("trust", "timeout", "local_transport"):
        unset = "the group's own" if name == "timeout" else "None"
        checks.append(
            _same(ranks, name, lambda one, name=name, unset=unset: _shown(one["settings"][name], unset), "note")
        )
    return checks


def _shown(value: object, unset: str) -> str:
    return unset if value is None else str(value)


def _pages(ranks: Sequence[Mapping[str, Any]]) -> Check:
    without = [one["rank"] for one in ranks if one["huge_pages"] == "never"]
    if without:
        return Check(
            "note", "huge pages", f"never on rank {short(without)}: large receives take two to three times as long"
        )
    return _same(ranks, "huge pages", lambda one: one["huge_pages"], "note")


def _network(ranks: Sequence[Mapping[str, Any]], hosts: int) -> list[Check]:
    checks = [
        _same(
            ranks,
            "interface",
            lambda one: one["interface"] or "gloo's own choice (GLOO_SOCKET_IFNAME is not set)",
            "note",
        )
    ]
    lost = [one["rank"] for one in ranks if one["loopback"] and not one["interface"]]
    if hosts > 1 and lost:
        text = f"the host's name leads to itself only on rank {short(lost)}: set GLOO_SOCKET_IFNAME there"
        checks.append(Check("FAIL", "host name", text))
    return checks


def nnscaler() -> Check:
    """What ``python -m nnscaler_integration`` says, in a process of its own: nnScaler changes what imports it."""
    if importlib.util.find_spec("nnscaler") is None and not os.environ.get("NNSCALER_HOME"):
        return Check("ok", "nnScaler", "not installed; nothing but nnscaler_integration needs it")
    command = [sys.executable, "-m", "nnscaler_integration"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NNSCALER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("FAIL", "nnScaler", f"nnscaler_integration does not answer: {error}")
    told = dict(re.findall(r"^(\w[\w >.]*?)  +(.*)$", done.stdout, re.MULTILINE))
    if done.returncode == 0 and "nnScaler" in told:
        return Check("ok", "nnScaler", f"{told['nnScaler']}; {told.get('anchors', '?')}")
    last = (done.stderr.strip() or "no reason was given").splitlines()[-1]
    return Check("FAIL", "nnScaler", told.get("cannot install", last))


def short(ranks: Sequence[int]) -> str:
    """Ranks for a person: runs of neighbours are joined.

    >>> short([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    name = torch.cuda.get_device_name() if kind.type == "cuda" else kind.type
    return f"{torch.accelerator.device_count()} x {name}"


def _huge_pages() -> str:
    try:
        chosen = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        return "none on this system"
    return chosen.group(1) if chosen else "unknown"


def _name_is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True
