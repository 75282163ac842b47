"""What no input may cause: an untyped error, code that runs, an import, a stall, memory out of proportion."""

from __future__ import annotations

import resource
import sys
import time
import zoneinfo  # noqa: F401  its first import looks for the configuration of Python
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from objcomm.errors import DecodeError, LimitError, ProtocolError, TrustError

TYPED = (DecodeError, LimitError, ProtocolError, TrustError)
MAX_BYTES = 1 << 20
SECONDS = 5.0  # of processor time
# Beyond what an input of at most 64 KiB, with up to MAX_BYTES of memory behind it, has any use for.
GROWTH_BYTES = 256 << 20

# Importing what rebuilds a value of numpy, of torch or a time zone is no choice of the sender's.
_KNOWN = ("numpy", "torch", "zoneinfo", "_zoneinfo", "encodings")
_RUNS = frozenset(
    (
        *("exec", "compile", "marshal.loads", "pickle.find_class", "code.__new__", "ctypes.dlopen"),
        *("os.system", "os.exec", "os.posix_spawn", "os.remove", "subprocess.Popen", "socket.connect", "socket.bind"),
    )
)


class Violation(Exception):
    """An input did what none may do. It derives from no error that objcomm turns into one of its own."""

    __init__ = Exception.__init__


class Canary:
    """Hears of all that is imported or executed, while it watches."""

    def __init__(self) -> None:
        self.watching = False
        self.heard: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event in _RUNS or (event == "import" and str(args[0]).partition(".")[0] not in _KNOWN):
            # compile and exec belong to the import of a known module.
            if event in ("exec", "compile", "marshal.loads", "ctypes.dlopen") and _importing():
                return
            self.heard.append(f"{event} {str(args[:2])[:200]}")
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            self.heard.append(f"open {args[0]} for writing")


def _importing() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


canary = Canary()


@contextmanager
def watched(*, runs_nothing: bool = True) -> Iterator[None]:
    """Run an input. What objcomm may raise about it is swallowed. In cluster trust it may have something imported.

    Raises:
        Violation: it did what it may not.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    canary.heard.clear()
    canary.watching = runs_nothing
    try:
        yield
    except TYPED:
        pass
    finally:
        canary.watching = False
    if canary.heard:
        raise Violation(f"something ran: {canary.heard[:3]}")
    took = time.process_time() - start
    if took > SECONDS:
        raise Violation(f"it took {took:.1f} s")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > GROWTH_BYTES:
        raise Violation(f"memory grew by {grown >> 20} MiB")


Target = Callable[[bytes], None]


def corpus(name: str) -> list[Path]:
    """The files of a target's corpus."""
    return sorted((Path(__file__).parent / "corpus" / name).iterdir())
