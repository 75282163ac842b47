"""What a hostile rank sends, and what tells whether anything of it ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fuzz.guard import canary

_touched: list[str] = []


def touch() -> None:
    """What the payloads want to have run."""
    _touched.append("touched")


class RunsCode:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return touch, ()


class Untouched:
    """Tells whether code of somebody else has run in this process."""

    def payloads(self) -> dict[str, Any]:
        """Objects that can only arrive by running or loading code, by what they are."""

        class OfHere:
            pass

        linear: Any = torch.nn.Linear(2, 2)
        return {
            "pickle": {"a": [1, RunsCode()]},
            "pickle with tensors": [torch.ones(300_000), RunsCode()],
            "class by value": OfHere(),
            "function": lambda: 1,
            "module": linear,
            "script": {"m": torch.jit.script(linear)},
            "graph": [fx.symbolic_trace(linear)],
            "exported": torch.export.export(linear, (torch.ones(1, 2),)),
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Nothing may be imported, unpickled or executed inside, in any thread of this process."""
        canary.heard.clear()
        canary.watching = True
        try:
            yield
        finally:
            canary.watching = False
        assert canary.heard == []
        assert _touched == []
