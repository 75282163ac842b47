"""Installing and uninstalling; what is said where nnScaler is missing or is not the one that was tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnscaler_integration.anchors import ANCHORS, TESTED_VERSIONS, Anchor, anchors_of
from nnscaler_integration.patching import Patch, Patches

from .pool import ROOT, Pool


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with no nnScaler but what ``env`` names."""
    base = {key: value for key, value in os.environ.items() if key not in ("NNSCALER_HOME", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**base, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# An installed nnScaler must not be found where a test is about a missing one.
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "nnscaler" and path is None:
            raise ModuleNotFoundError("No module named 'nnscaler'", name="nnscaler")
sys.meta_path.insert(0, Hide())
"""


def fake_checkout(folder: Path, version: str) -> Path:
    """A checkout that has nothing but a version."""
    package = folder / "nnscaler"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return folder


def test_without_nnscaler() -> None:
    done = python(
        HIDE
        + """
import nnscaler_integration, nnscaler_integration.plan
print(nnscaler_integration.status())
nnscaler_integration.uninstall()
nnscaler_integration.install()
"""
    )
    assert "not found" in done.stdout
    assert "RuntimeError: nnScaler is missing: it is not installed, and NNSCALER_HOME" in done.stderr


def test_home_that_holds_none(tmp_path: Path) -> None:
    done = python(HIDE + "import nnscaler_integration; nnscaler_integration.install()", NNSCALER_HOME=str(tmp_path))
    assert f"{tmp_path} (NNSCALER_HOME) holds none" in done.stderr


def test_a_missing_dependency_of_nnscaler_is_named(tmp_path: Path) -> None:
    (tmp_path / "nnscaler").mkdir()
    (tmp_path / "nnscaler" / "__init__.py").write_text("import what_nnscaler_needs\n")
    done = python("import nnscaler_integration; nnscaler_integration.install()", NNSCALER_HOME=str(tmp_path))
    assert "because the module 'what_nnscaler_needs' is missing" in done.stderr


@pytest.mark.parametrize("found", ["0.7", "1.0", *TESTED_VERSIONS])
def test_another_nnscaler_is_refused_by_what_differs(tmp_path: Path, found: str) -> None:
    home = fake_checkout(tmp_path, found)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import nnscaler_integration as n; n.install()"
    done = python(code.replace("sys.argv[1]", repr(str(home))))
    assert done.returncode != 0
    assert f"nnScaler {found}" in done.stderr
    assert ("was not tested, only 0.8, 0.9" in done.stderr) == (found not in TESTED_VERSIONS)
    assert "nnscaler.graph.gener.gen.IRAdapterGener.gen_activation: not there" in done.stderr


def test_the_command_prints_versions_anchors_and_state(tmp_path: Path) -> None:
    home = fake_checkout(tmp_path, "0.7")
    code = "import sys, runpy; sys.path.insert(0, {!r}); runpy.run_module('nnscaler_integration', run_name='__main__')"
    done = python(code.format(str(home)))
    assert done.returncode == 1
    for text in ("0.7", "torch", "anchors", "0 of", "installed", "cannot install"):
        assert text in done.stdout


def test_every_version_has_anchors() -> None:
    for version in TESTED_VERSIONS:
        assert len(anchors_of(version)) > 15
    assert len({(str(anchor), versions) for anchor in ANCHORS for versions in anchor.versions}) == sum(
        len(anchor.versions) for anchor in ANCHORS
    )


def test_anchor_differences() -> None:
    assert Anchor("os.path", "join", "a p").difference() is None
    assert Anchor("os.path", "join", "a b").difference() == "os.path.join: takes (a p), tested with (a b)"
    assert Anchor("os.path", "basename", "p", mentions="rfind").difference() is None
    assert Anchor("os.path", "basename", "p", mentions="split").difference() == "os.path.basename: no longer uses split"
    assert Anchor("os.path", "nothing", "a").difference() == "os.path.nothing: not there"
    assert Anchor("no.such.module", "nothing", "a").difference() == "no.such.module.nothing: not there"


class Owner:
    @staticmethod
    def static(x: int) -> int:
        return x

    def method(self) -> str:
        return "original"


def test_patches_are_reversible() -> None:
    before = dict(vars(Owner))
    patches = Patches()
    patches.apply(
        [
            Patch(Owner, "static", lambda original: lambda x: original(x) + 1),
            Patch(Owner, "method", lambda original: lambda self: original(self) + "!"),
        ]
    )
    assert (Owner.static(1), Owner().static(1), Owner().method()) == (2, 2, "original!")
    patches.revert()
    assert dict(vars(Owner)) == before


def test_patches_are_all_or_none() -> None:
    before = dict(vars(Owner))
    with pytest.raises(KeyError):
        Patches().apply(
            [
                Patch(Owner, "method", lambda original: lambda self: "replaced"),
                Patch(Owner, "missing", lambda original: original),
            ]
        )
    assert dict(vars(Owner)) == before


def test_installing_is_idempotent_and_reversible(pool: Pool) -> None:
    for text in pool.run("tests.nnscaler.state_jobs:install_and_uninstall", 1):
        assert "installed       yes" in text


def test_code_after_uninstalling_is_that_of_never_having_installed(pool: Pool) -> None:
    pool.close()  # ranks that never installed anything
    (found,) = pool.run("tests.nnscaler.state_jobs:code_around_installing", 1)
    assert found["before"] == found["after"]
    assert found["before"] != found["installed"]
    assert found["before without objects"] == found["installed without objects"] == found["after without objects"]
