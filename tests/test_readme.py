"""What README says must hold: its examples run, and its tables leave nothing out and invent nothing."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import objcomm
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _names(section: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))


def test_it_opens_with_the_two_commands() -> None:
    assert README.index("make demo") < README.index("make test") < README.index("```python")


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(index) for index in range(len(EXAMPLES))])
def test_examples_run_on_two_ranks(example: str) -> None:
    def body(rank: int) -> None:
        import torch.distributed as dist

        if "init_process_group" not in example:
            dist.init_process_group("gloo")
        exec(compile(example, f"README example of rank {rank}", "exec"), {"__name__": "__main__", "rank": rank})

    run_ranks(body, 2, backend=None)


def test_every_call_is_in_the_table() -> None:
    public = (name for name in objcomm.__all__ if inspect.isfunction(getattr(objcomm, name)))
    assert _names("Calls") == set(public)


def test_every_error_is_in_the_table() -> None:
    def below(cls: type) -> set[str]:
        return {cls.__name__}.union(*map(below, cls.__subclasses__()))

    public = {name for name in below(objcomm.ObjcommError) if name in objcomm.__all__}
    assert _names("Errors") == public - {"ObjcommError"}


def test_every_setting_is_in_the_table() -> None:
    assert _names("Settings") >= {field.name for field in dataclasses.fields(objcomm.settings())}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_what_continuous_integration_runs_is_said(document: str) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    targets = {target for line in re.findall(r"^make (.*)$", script, re.MULTILINE) for target in line.split()}
    assert targets == {"lint", "types", "docs"}
    assert script.splitlines()[-1] == "exec .venv/bin/python -m pytest"
    text = (ROOT / document).read_text()
    assert [
        name
        for name in [*(f"make {target}" for target in targets), "make test", "make examples", ".ci/smoke"]
        if name not in text
    ] == []


def test_versions_agree() -> None:
    assert f'\nversion = "{objcomm.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {objcomm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
