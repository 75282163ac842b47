"""docs/nnscaler.md: its code runs, and the generated code that it shows is what is generated."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .pool import ROOT, Pool

TEXT = (ROOT / "docs" / "nnscaler.md").read_text()
BLOCKS = [
    (TEXT.count("\n", 0, block.start()) + 1, block.group(1))
    for block in re.finditer(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
]
GENERATED = [text for _, text in BLOCKS if text.startswith("# rank")]


def _functions(text: str) -> list[tuple[str, ast.FunctionDef]]:
    """The functions of a block, each with the rank that the comment above it names."""
    found = []
    for part in re.split(r"^# rank (?=\d)", text, flags=re.MULTILINE)[1:]:
        found += [
            (part[0], node) for node in ast.parse(part.partition("\n")[2]).body if isinstance(node, ast.FunctionDef)
        ]
    return found


def _statements(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(node) for node in function.body if ast.unparse(node) != "..."]


def test_the_blocks_run(pool: Pool, tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block[1] not in GENERATED]
    assert len(blocks) == 4
    told = pool.run("tests.nnscaler.docs_jobs:run_blocks", 2, blocks, str(tmp_path))
    assert told == ["ParallelModule, {'micro-batch': 0}"] * 2


def test_what_is_shown_is_what_is_generated(pool: Pool, version: str, tmp_path: Path) -> None:
    if version != "0.8":
        pytest.skip("the names are those of nnScaler 0.8")
    codes = pool.run("tests.nnscaler.docs_jobs:generate", 2, str(tmp_path))
    before, after = GENERATED
    for rank, shown in _functions(after):
        nodes = [node for node in ast.walk(ast.parse(codes[int(rank)])) if isinstance(node, ast.FunctionDef)]
        (made,) = [node for node in nodes if node.name == shown.name]
        assert [argument.arg for argument in made.args.args] == [argument.arg for argument in shown.args.args]
        lines = iter(_statements(made))
        # In this order; what is left out is between them.
        assert [line for line in _statements(shown) if line not in lines] == []
    # Alone, nnScaler makes the same without the object.
    ((_, alone),) = _functions(before)
    with_objects = _statements(_functions(after)[-1][1])
    assert _statements(alone) == [line for line in with_objects if not re.match(r"getitem_28 =|del getitem_28", line)]
