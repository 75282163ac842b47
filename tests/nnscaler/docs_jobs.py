"""What the ranks do in a test of docs/nnscaler.md."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnscaler_integration
import objcomm

from . import cpu
from .pool import ROOT

cpu.pretend()
nnscaler_integration.status()  # finds nnScaler in a checkout too


def run_blocks(rank: int, blocks: list[tuple[int, str]], folder: str) -> str:
    """Run the document's Python blocks, given with their lines, one after the other; says what became of the model."""
    import nnscaler

    os.chdir(folder)
    # The reader has GPUs, on which nnScaler traces.
    original, nnscaler.ComputeConfig = nnscaler.ComputeConfig, partial(nnscaler.ComputeConfig, trace_strategy="cpu")
    names: dict[str, Any] = {"__name__": "__main__", "rank": rank, "torch": torch, "dist": dist, "objcomm": objcomm}
    try:
        for line, text in blocks:
            exec(compile("\n" * line + text, "docs/nnscaler.md", "exec"), names)
    finally:
        nnscaler.ComputeConfig = original
        nnscaler_integration.uninstall()
    return f"{type(names['model'].layers[0]).__mro__[1].__name__}, {names['context']}"


def generate(rank: int, folder: str) -> str:
    """What nnScaler generates for this rank of the document's model, with its policy."""
    import nnscaler

    sys.path.append(str(ROOT / "examples"))
    example = importlib.import_module("nnscaler_nested_dict")

    nnscaler_integration.install()
    try:
        torch.manual_seed(0)
        x, content = example.sample(0)
        config = nnscaler.ComputeConfig(
            2, 2, use_end2end=True, pas_config={"pipeline_nmicros": 4}, trace_strategy="cpu"
        )
        nnscaler.parallelize(
            example.Model(),
            {"x": x, "content": content},
            example.policy,
            config,
            gen_savedir=folder,
            reuse="override",
            load_module=False,
        )
    finally:
        nnscaler_integration.uninstall()
    dist.barrier()
    (path,) = Path(folder).rglob(f"gencode{rank}.py")
    return path.read_text()
