"""Every code block of README and docs: Python runs on two ranks, and every command is one that there is.

The Python blocks of a document run one after the other in one namespace, with ``rank``, ``torch``, ``dist`` and
``objcomm`` at hand. README's own Python blocks are run by tests/test_readme.py, each by itself, and those about
nnScaler by tests/nnscaler/test_docs.py.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import objcomm
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GIVEN = {"rank", "torch", "dist", "objcomm"}


class Block(NamedTuple):
    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def _blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = []
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(str(path.relative_to(ROOT)), line, match.group(1).strip(), match.group(2)))
    return found


BLOCKS = [block for path in DOCUMENTS for block in _blocks(path)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [block for block in BLOCKS if block.language in ("", "console")]


def _bound(tree: ast.AST) -> set[str]:
    """Every name that is given a value anywhere in ``tree``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _whole(blocks: list[Block]) -> list[Block]:
    """Those that can be run one after the other."""
    known = GIVEN | set(dir(builtins))
    whole = []
    for block in blocks:
        tree = ast.parse(block.text)
        if _used(tree) <= known | _bound(tree):
            known |= _bound(tree)
            whole.append(block)
    return whole


def _documents() -> list[Any]:
    found = []
    for path in DOCUMENTS[1:]:
        whole = _whole([block for block in PYTHON if block.document == str(path.relative_to(ROOT))])
        # Those about nnScaler are run by tests/nnscaler/test_docs.py.
        if whole and path.name != "nnscaler.md":
            found.append(pytest.param(whole, id=path.name))
    return found


@pytest.mark.parametrize("blocks", _documents())
def test_python_blocks_run_on_two_ranks(blocks: list[Block]) -> None:
    def body(rank: int) -> None:
        import torch
        import torch.distributed as dist

        import objcomm

        if not any("init_process_group" in block.text for block in blocks):
            dist.init_process_group("gloo")
        names = {"__name__": "__main__", "rank": rank, "torch": torch, "dist": dist, "objcomm": objcomm}
        for block in blocks:
            exec(compile("\n" * block.line + block.text, block.document, "exec"), names)

    run_ranks(body, 2, backend=None)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_calls_of_objcomm_fit_the_functions(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if not isinstance(node, ast.Call) or not re.fullmatch(r"objcomm(\.\w+)+", ast.unparse(node.func)):
            continue
        target: Any = objcomm
        for name in ast.unparse(node.func).split(".")[1:]:
            if not hasattr(target, name):
                importlib.import_module(f"{target.__name__}.{name}")
            target = getattr(target, name)
        if any(isinstance(argument, ast.Starred) or ast.unparse(argument) == "..." for argument in node.args):
            continue
        arguments = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        inspect.signature(target).bind(*node.args, **arguments)


def test_readme_has_no_excerpts() -> None:
    mine = [block for block in PYTHON if block.document == "README.md"]
    assert all(_whole([block]) for block in mine)


def test_no_block_is_of_another_kind() -> None:
    checked = ("python", "console", "text", "")
    assert [str(block) for block in BLOCKS if block.language not in checked] == []


def _commands() -> list[Any]:
    found = []
    for block in COMMANDS:
        lines = block.text.splitlines()
        # In a console, what stands behind no prompt is output.
        chosen = [line[2:] for line in lines if line.startswith("$ ")] if block.language else lines
        found += [pytest.param(line.partition("#")[0].strip(), id=f"{block}-{line}") for line in chosen if line.strip()]
    return found


@pytest.mark.parametrize("command", _commands())
def test_commands_are_there(command: str) -> None:
    # A value that the reader has to fill in, and settings in front.
    words = shlex.split(re.sub(r"<[^>]*>", "VALUE", command))
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if words[0] == "torchrun" and "-m" in words:
        words = ["python", *words[words.index("-m") :]]
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[:2] == ["pip", "install"]:
        extra = re.fullmatch(r"(?:objcomm|\.)(?:\[([a-z,]+)\])?", words[-1])
        assert extra
        for name in (extra.group(1) or "").split(","):
            assert not name or f"\n{name} = [" in (ROOT / "pyproject.toml").read_text()
    elif words[:2] == ["python", "-m"]:
        names = [word for word in words[3:] if re.fullmatch(r"[a-z]+", word)] if words[2] == "objcomm" else []
        done = subprocess.run(
            [sys.executable, "-m", words[2], *names, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert [word for word in words if word.startswith("--") and word not in done.stdout] == []
    else:
        assert words[0] in ("python", "torchrun"), f"what is {words[0]}?"
        scripts = [word for word in words if word.endswith(".py")]
        assert scripts
        # One of the project, or one that the reader has just saved.
        assert all((ROOT / script).exists() for script in scripts if "/" in script)


def _shows_generated_code(block: Block) -> bool:
    """Compared with what is generated by tests/nnscaler/test_docs.py."""
    return block.document == "docs/nnscaler.md" and block.text.startswith("# rank")


def test_no_block_is_an_excerpt() -> None:
    for document in {block.document for block in PYTHON}:
        mine = [block for block in PYTHON if block.document == document and not _shows_generated_code(block)]
        assert [str(block) for block in mine if block not in _whole(mine)] == []


def test_every_block_is_found() -> None:
    """Neither other fences, nor fences that are indented, nor blocks that are nothing but indented."""
    for path in DOCUMENTS:
        lines = path.read_text().splitlines()
        fences = [line for line in lines if re.match(r"\s*(```|~~~)", line)]
        assert len(fences) == 2 * len([block for block in BLOCKS if block.document == str(path.relative_to(ROOT))])
        inside = False
        for number, line in enumerate(lines):
            inside ^= line.startswith("```")
            assert inside or not re.match(r"    (?![*-] |\d+\. )\S", line) or lines[number - 1], f"{path}:{number + 1}"


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        target, _, place = link.partition("#")
        if re.match(r"https?:", link):
            continue
        there = (path.parent / target) if target else path
        assert there.exists(), link
        headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if place else []
        assert not place or place in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_the_page_of_calls_leaves_nothing_out() -> None:
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "calls.md").read_text(), re.MULTILINE)
    assert len(shown) == len(set(shown))
    public = {f"objcomm.{name}" for name in objcomm.__all__ if name != "autograd"}
    public |= {f"objcomm.autograd.{name}" for name in objcomm.autograd.__all__}
    public |= {f"objcomm.torch_compat.{name}" for name in ("install", "uninstall", "installed", "is_installed")}
    assert set(shown) == public


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}
