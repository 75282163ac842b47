"""The example of the drop-in, as torchrun would run it."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

from tests.ranks import run_ranks

FOLDER = Path(__file__).parent.parent / "examples" / "drop_in"


def test_plain_torch_by_turns_with_objcomm() -> None:
    def ranks(rank: int) -> list[str]:
        sys.path.insert(0, str(FOLDER))  # where Python looks first for a script
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(FOLDER / "plain_torch.py"), run_name="__main__")
        return printed.getvalue().splitlines()

    lines, others = run_ranks(ranks, 2, backend=None, env={"ROUNDS": "1"}, timeout=120)
    assert others == []
    assert [line.split(",")[0] for line in lines] == [
        "broadcast_object_list",
        "broadcast_object_list",
        "all_gather_object",
        "scatter_object_list",
        "torch.distributed.checkpoint",
    ]
    assert all("torch " in line and "objcomm " in line and line.endswith(" x") for line in lines)
