"""The layering of objcomm: imports point only downwards, few packages are needed, and files stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each part may import from the layers below its own, and from files of its own part.
LAYERS = [
    {"__init__", "__main__", "cli"},
    {"p2p", "collectives", "autograd", "torch_compat"},
    {"direct", "sweep", "star"},
    {"failures"},
    {"rollcall"},
    {"debugging"},
    {"team"},
    {"work"},
    {"diagnosis", "watcher"},
    {"arrival", "relay", "outgoing", "incoming", "segments", "pair", "pairs"},
    {"wire", "codec", "transport"},
    {"errors", "config", "deadline", "counters", "timeline", "hostmemory", "labels", "packed", "scope", "turn"},
]
# Parts of one layer that may know each other. codec, wire and transport never do.
COMPANIONS = [
    {"arrival", "relay", "outgoing", "incoming", "segments", "pair", "pairs"},
    {"diagnosis", "watcher"},
    LAYERS[0],
    LAYERS[1],
    LAYERS[2],
    LAYERS[-1],
]
THIRD_PARTY = {"torch", "cloudpickle", "msgpack"}
MAX_LINES = 320


def _level(part: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def _imports(tree: ast.AST, module: list[str], *, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """Line, absolute dotted name and whether it runs when the module is imported, of everything imported."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checked_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = module[: len(module) - child.level + is_package] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                yield from ((child.lineno, f"{base}.{alias.name}", at_import) for alias in child.names)
            else:
                yield from walk(child, at_import and not inside and not checked_only)

    yield from walk(tree, True)


def violations(root: Path) -> list[str]:
    """Everything in ``root/objcomm`` that the rules forbid, as ``file:line: what``."""
    found = []
    for path in sorted((root / "objcomm").rglob("*.py")):
        relative = path.relative_to(root)
        module = list(relative.with_suffix("").parts)
        is_package = module[-1] == "__init__"
        part = module[1]
        if is_package:
            module.pop()
        text = path.read_text()
        if text.count("\n") > MAX_LINES:
            found.append(f"{relative}:1: {text.count(chr(10))} lines, more than {MAX_LINES}")
        if _level(part) is None:
            found.append(f"{relative}:1: {part} has no layer")
            continue
        for line, name, at_import in _imports(ast.parse(text), module, is_package=is_package):
            complaint = _complaint(part, name, at_import)
            if complaint:
                found.append(f"{relative}:{line}: {complaint}")
    return found


def _complaint(part: str, name: str, at_import: bool) -> str | None:
    top, *rest = name.split(".")
    if top in ("nnscaler_integration", "nnscaler", "tests", "benchmarks"):
        return f"objcomm knows nothing of {top}"
    if top != "objcomm":
        allowed = top in sys.stdlib_module_names or top in THIRD_PARTY or not at_import
        return None if allowed else f"{top} is imported at module level: only {sorted(THIRD_PARTY)} may be"
    target = rest[0] if rest else "__init__"
    if _level(target) is None:
        target = "__init__"  # a name of the package itself, such as objcomm.send_object
    mine, its = _level(part), _level(target)
    assert mine is not None
    assert its is not None
    if target == part or its > mine or any({part, target} <= together for together in COMPANIONS):
        return None
    return f"{part} imports {target}, which is not below it"


def test_imports_point_downwards_and_files_are_short() -> None:
    assert violations(ROOT) == []


def test_the_plan_of_the_house_is_the_table_of_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows][:4] == [{"cli"}, *LAYERS[1:4]]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(set().union(*LAYERS) - {"__init__", "__main__"})
    levels = [_level(name) for name in told]
    assert all(isinstance(level, int) for level in levels)
    assert levels == sorted(levels, key=lambda level: level or 0)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("codec/tensors.py", "from ..wire import frame", "codec imports wire"),
        ("codec/tensors.py", "from .. import transport", "codec imports transport"),
        ("codec/__init__.py", "from ..pair import Pair", "codec imports pair"),
        ("errors.py", "from .codec import encode", "errors imports codec"),
        ("wire/frame.py", "import objcomm.work", "wire imports work"),
        ("wire/frame.py", "def f():\n    from objcomm import send_object", "wire imports __init__"),
        ("work.py", "if True:\n    from .p2p import send_object", "work imports p2p"),
        ("p2p.py", "from .cli import main", "p2p imports cli"),
        ("p2p.py", "import nnscaler_integration.plan", "knows nothing of nnscaler_integration"),
        ("p2p.py", "import tests.ranks", "knows nothing of tests"),
        ("codec/arrays.py", "try:\n    import numpy\nexcept ImportError: pass", "numpy is imported at module level"),
        ("p2p.py", "\n" * 400, "400 lines"),
        ("helpers.py", "", "helpers has no layer"),
    ],
)
def test_what_is_forbidden_is_found(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    target = tmp_path / "objcomm" / file
    target.parent.mkdir(parents=True)
    target.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cli/demo.py", "import objcomm\nfrom ..p2p import send_object\nfrom .text import lines"),
        ("work.py", "from .pair import Pair\nfrom .errors import PeerError\nimport torch.distributed"),
        ("codec/arrays.py", "def f():\n    import numpy"),
        ("codec/arrays.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy"),
        ("codec/__init__.py", "from .memory import MemoryWriter\nfrom ..errors import EncodeError"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path: Path, file: str, text: str) -> None:
    target = tmp_path / "objcomm" / file
    target.parent.mkdir(parents=True)
    target.write_text(text)
    assert violations(tmp_path) == []


def test_importing_objcomm_needs_neither_numpy_nor_nnscaler() -> None:
    code = (
        "import sys; sys.modules['nnscaler'] = sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import objcomm, objcomm.cli\n"
        "assert not [m for m in sys.modules if m.startswith(('tests', 'nnscaler_integration'))]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
