"""The short run: every file of the corpus, then changes of them at random, for some seconds. It needs nothing else.

    python -m fuzz.short [SECONDS] [SEED]

Ends with 0 if no input did what none may do (see guard.py); an abort ends it too.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from .guard import Violation, corpus
from .mutate import MUTATORS, raw
from .targets import TARGETS


def replay(name: str) -> list[bytes]:
    """Run the corpus of one target; returns its inputs."""
    inputs = [path.read_bytes() for path in corpus(name)]
    for data in inputs:
        _run(name, data)
    return inputs


def vary(name: str, inputs: list[bytes], seconds: float, rng: random.Random) -> int:
    """Run changed inputs for so long; returns how many."""
    runs = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = rng.choice(inputs)
        for _ in range(rng.choice((1, 1, 2, 5))):
            data = (MUTATORS[name] if rng.random() < 0.7 else raw)(data, rng)
        _run(name, data)
        runs += 1
    return runs


def _run(name: str, data: bytes) -> None:
    try:
        TARGETS[name](data)
    except BaseException as error:
        kept = Path("build/fuzz") / f"{name}-failed"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
        what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        raise SystemExit(f"{name}: {what}; the input is in {kept}") from error


def main(arguments: list[str]) -> None:
    seconds = float(arguments[0]) if arguments else 5.0
    rng = random.Random(int(arguments[1]) if len(arguments) > 1 else None)
    for name in TARGETS:
        inputs = replay(name)
        runs = vary(name, inputs, seconds / len(TARGETS), rng)
        print(f"{name}: {len(inputs)} inputs of the corpus, {runs} changed ones")


if __name__ == "__main__":
    main(sys.argv[1:])
