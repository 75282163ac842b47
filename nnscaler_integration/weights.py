"""The tensors that nnScaler stored beside generated code, against those of a module of this process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_STORED = "fullmodel.pt"
# The name in the generated module, the number of the tensor, whether it is a parameter, the name in the original one.
_MAPPED = re.compile(r"self\.add_full_map\('[^']+', (\d+), (?:True|False), '([^']+)'")


def stored_files(folder: Path) -> list[Path]:
    """The files with the tensors, in their order; empty where nothing was traced yet."""
    files: list[Path] = []
    while (path := folder / f"{_STORED}.{len(files)}").is_file():
        files.append(path)
    return files


def stored_names(folder: Path) -> dict[int, set[str]]:
    """The original names of every stored tensor that the code of some rank uses. Tied ones have several."""
    names: dict[int, set[str]] = {}
    for path in folder.glob("gencode*.py"):
        for number, name in _MAPPED.findall(path.read_text()):
            names.setdefault(int(number), set()).add(name)
    return names


def tensors_of(module: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of the names that are tensors of the module: parameters, buffers, plain attributes."""
    found = {}
    for name in names:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, torch.Tensor):
            found[name] = value.detach()
    return found


def differing(folder: Path, module: torch.nn.Module) -> list[str]:
    """The names of tensors whose stored value is not the module's. What the module does not name is left out."""
    names = stored_names(folder)
    own = tensors_of(module, sorted(set().union(*names.values())))
    found: set[str] = set()
    for path in stored_files(folder):
        for number, value in torch.load(path, map_location="cpu").items():
            same = [name for name in names.get(number, ()) if name in own]
            found |= {name for name in same if not _same(value, own[name])}
    return sorted(found)


def _same(stored: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether they are the same bits; ``module_dtype`` may have changed the dtype of what was stored."""
    return stored.shape == own.shape and torch.equal(_bits(stored), _bits(own.to(stored)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def fill(module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every tensor of a generated module its part of the whole tensor of that original name."""
    for name, meta in module.fullmap.items():
        part = tensors[meta.orig_name][meta.slicers]
        getattr(module, name).copy_(part if meta.val_chunks == 1 else part / meta.val_chunks)
