"""What this process is and holds, as the kernel tells."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable

import objcomm


def descriptors() -> dict[int, str]:
    """What is open, by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def sockets() -> set[int]:
    """Those that are sockets."""
    return {number for number, link in descriptors().items() if link.startswith("socket:")}


def a_forked_child_is_refused(send: Callable[[], object], leave: Callable[[], None]) -> None:
    """``send`` is refused in a child of this process, which then does what it would at its end, ``leave``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, as it should
        child = os.fork()
    if child == 0:
        code = 1
        try:
            send()
        except objcomm.UsageError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            leave()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
