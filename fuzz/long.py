"""The long run, guided by coverage. It needs atheris, which is not among the project's requirements.

    python -m fuzz.long skeleton -max_total_time=1800        any option of libFuzzer may follow

What ends an input is in guard.py; libFuzzer adds an abort, 30 s on the clock and 3 GiB.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris


def main() -> None:
    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["objcomm"]):
        from . import mutate, targets
    target, mutator = targets.TARGETS[name], mutate.MUTATORS[name]
    from .guard import corpus

    for path in corpus(name):  # so that what is imported at its first use has been imported
        target(path.read_bytes())

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = mutator(data, rng) if rng.random() < 0.6 else atheris.Mutate(data, most)
        return bytes(changed[:most])

    work = Path("build/fuzz") / name
    work.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent / "corpus" / name
    arguments = [
        *(sys.argv[0], "-timeout=30", "-rss_limit_mb=3072", "-max_len=16384", "-print_final_stats=1"),
        *(f"-artifact_prefix={work}/crash-", *options, str(work), str(here)),
    ]
    (work / "found").mkdir(exist_ok=True)
    arguments[-2] = str(work / "found")
    atheris.Setup(arguments, target, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
