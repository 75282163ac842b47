"""What a rank does in a test of installing, and of code that was generated before."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nnscaler_integration

from .cases import Case
from .contexts import repaired
from .jobs import generate

OBJECTS = Case("Chain", "Staged", {"cuts": (1,), "devices": ((0,), (1,)), "schedule": "1f1b", "micros": 2}, samples=2)
NO_OBJECTS = replace(OBJECTS, arguments={"use": ()})


def _everything_of_nnscaler() -> dict[str, Any]:
    """Every attribute of every module and class of nnScaler that is loaded."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "nnscaler" and module is not None:
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update({f"{name}.{key}.{part}": inner for part, inner in vars(value).items()})
    return found


def install_and_uninstall(rank: int) -> str:
    """Install twice, uninstall twice, and compare nnScaler before and after, attribute by attribute."""
    from nnscaler.graph.tracer import wrap_utils

    import nnscaler_integration.codegen  # so that all of nnScaler that it needs is loaded

    def differing() -> list[str]:
        after = _everything_of_nnscaler()
        assert after.keys() == before.keys()
        return [name for name, value in after.items() if value is not before[name]]

    before = _everything_of_nnscaler()
    leaves = list(wrap_utils.default_autowrap_leaf_function.items())
    nnscaler_integration.install()
    once = differing()
    assert once
    nnscaler_integration.install()
    assert differing() == once
    nnscaler_integration.install(object_outputs=True)
    assert nnscaler_integration.status().object_outputs
    text = str(nnscaler_integration.status())
    nnscaler_integration.install()
    assert not nnscaler_integration.status().object_outputs
    nnscaler_integration.install(object_outputs=True)
    nnscaler_integration.uninstall()
    nnscaler_integration.uninstall()
    assert not differing()
    assert list(wrap_utils.default_autowrap_leaf_function.items()) == leaves
    assert not nnscaler_integration.status().installed
    assert nnscaler_integration.status().reason is None
    return text


def _codes(case: Case, name: str, folder: str, **options: Any) -> str:
    generate(case, name, folder, load_module=False, **{"world": case.plan, **options})
    return "".join(path.read_text() for path in sorted(Path(folder).rglob("gencode*.py")))


def code_around_installing(rank: int) -> dict[str, str]:
    """The code of both ranks before installing, while installed, and after uninstalling."""
    found = {}
    # The first time, nnScaler fills caches of its search for adapters, and numbers what follows otherwise.
    for when in ("first", "before", "installed", "after"):
        for label, case in (("", OBJECTS), (" without objects", NO_OBJECTS)):
            with tempfile.TemporaryDirectory() as folder, repaired(when != "installed"):
                if when == "installed":
                    nnscaler_integration.install()
                found[when + label] = _codes(case, "around", folder)
                nnscaler_integration.uninstall()
    return found


def reuse_old_code(rank: int, reuse: str) -> dict[str, str]:
    """Generate without, then ask for the same with the integration."""
    with tempfile.TemporaryDirectory() as folder:
        with repaired(True):
            old = _codes(OBJECTS, "old", folder)
        nnscaler_integration.install()
        new = _codes(OBJECTS, "old", folder, reuse=reuse)
        nnscaler_integration.uninstall()
        return {"old": old, "new": new}


def reuse_loaded_code(rank: int) -> str:
    """The same, where the process has loaded the old code."""
    from nnscaler.parallel import _load_parallel_module_class

    from . import models

    with tempfile.TemporaryDirectory() as folder:
        with repaired(True):
            _codes(OBJECTS, "loaded", folder)
        _load_parallel_module_class(models.Chain, gen_savedir=folder, instance_name="loaded", rank=1)
        nnscaler_integration.install()
        try:
            _codes(OBJECTS, "loaded", folder, reuse="match")
        except RuntimeError as error:
            return str(error.__cause__)
        finally:
            nnscaler_integration.uninstall()
    return "nothing"


def _kept(case: Case, name: str, installed_first: bool) -> dict[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        if installed_first:
            nnscaler_integration.install()
        with repaired(not installed_first):
            _codes(case, name, folder)
        paths = sorted(Path(folder).rglob("gencode*.py"))
        for path in paths:
            path.write_text(path.read_text() + "\n# a mark\n")
        nnscaler_integration.install()
        code = _codes(case, name, folder, reuse="match")
        nnscaler_integration.uninstall()
        return {"kept": code.count("# a mark") == len(paths) > 0}


def reuse_code_without_objects(rank: int) -> dict[str, bool]:
    return _kept(NO_OBJECTS, "none", installed_first=False)


def reuse_own_code(rank: int) -> dict[str, bool]:
    return _kept(OBJECTS, "own", installed_first=True)


def code_of(rank: int, case: Case, world: int) -> str:
    """The code of all ranks of a world of any size."""
    nnscaler_integration.install()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _codes(case, "code", folder, world=world)
    finally:
        nnscaler_integration.uninstall()


def volumes(rank: int) -> list[int]:
    """What the estimate says of a value that cannot be pickled, for one receiver and for two, and of one unknown."""
    from nnscaler.ir.cten import IRObject

    from nnscaler_integration.plan import Broadcast, Move
    from nnscaler_integration.prims import make_adapter

    known = IRObject("known", value={"a": torch.zeros(3, 4), "b": lambda: None})
    adapters = [
        make_adapter([known], [Move(0, 1)]),
        make_adapter([known], [Broadcast(0, (1, 2))]),
        make_adapter([IRObject("unknown")], [Move(0, 1)]),
    ]
    return [prim.volume() for adapter in adapters for prim in adapter.prims]
