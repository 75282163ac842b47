"""Runs the attempts, each in a process of its own.

    python -m attacks                 all, in both trust modes where they apply
    python -m attacks NAME [TRUST]    one

Each must end with a typed error ("refused"), within 10 s and without memory out of proportion. Ends with 0 if all do.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

from objcomm.config import Trust
from objcomm.errors import DecodeError, LimitError, ProtocolError, TrustError

from . import code, common, sizes, work
from .common import ALL, Attack

_SECONDS = 20
# Processor time; a machine may be busy with something else.
_BUSY_SECONDS = 10.0
_GROWTH_BYTES = 512 << 20
_REFUSED, _FAILED = 0, 1

__all__ = ["ALL", "code", "common", "sizes", "work"]


def run(name: str, trust: Trust) -> int:
    """Run one attempt in this process and print what became of it."""
    attack: Attack = ALL[name][0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    try:
        value = attack(trust)
    except (DecodeError, LimitError, ProtocolError, TrustError) as error:
        outcome = f"refused: {type(error).__name__}: {str(error)[:160]}"
    except BaseException as error:
        print(f"{name} ({trust}): failed: it ended with {type(error).__name__}: {str(error)[:160]}")
        return _FAILED
    else:
        print(f"{name} ({trust}): failed: it was taken, as {type(value).__name__}")
        return _FAILED
    busy = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if busy > _BUSY_SECONDS or grown > _GROWTH_BYTES:
        print(f"{name} ({trust}): failed: refused after {busy:.1f} s, with {grown >> 20} MiB more memory")
        return _FAILED
    print(f"{name} ({trust}): {outcome} [{busy:.2f} s, {grown >> 20} MiB]")
    return _REFUSED


def apart(name: str, trust: Trust) -> bool:
    """Run one attempt in a child: an abort is only the child's. Returns whether it was refused."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS * 3)
        try:
            status = run(name, trust)
            sys.stdout.flush()
        except BaseException:
            status = _FAILED
        os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        print(f"{name} ({trust}): failed: the process ended by {signal.Signals(os.WTERMSIG(status)).name}")
    return status == _REFUSED


def main(arguments: list[str]) -> int:
    names = arguments[:1] or sorted(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        print(f"there is no attempt {unknown[0]!r}; there are {', '.join(sorted(ALL))}")
        return 2
    outcomes = [apart(name, trust) for name in names for trust in ALL[name][1] if arguments[1:] in ([], [trust])]
    print(f"{sum(outcomes)} of {len(outcomes)} attempts were refused")
    return 0 if outcomes and all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
