"""The demo's data: lines of the standard library's own sources, in batches of every size and length."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

VOCABULARY = 128  # ASCII; every other character becomes the question mark
LONGEST = 96
_FILES = 40
_LINES = (6, 20)


class Line(NamedTuple):
    """Where a line comes from."""

    module: str
    number: int


@dataclass(frozen=True)
class Batch:
    """Some lines of one module, padded to the longest of them.

    Attributes:
        tokens: int64 (lines, longest); ``targets`` are the same, one character further on, as uint8.
        mask: bool, false where there is only padding.
        positions: int64, the column of each character in its source file.
        lengths: characters per line.
        lines: where each line comes from.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    lines: list[Line]


class Text:
    """A choice of modules of the standard library: the same for the same seed and the same Python."""

    def __init__(self, seed: int, folder: Path | None = None) -> None:
        folder = folder or Path(os.path.dirname(os.__file__))
        chooser = random.Random(seed)
        paths = sorted(folder.glob("*.py"))
        chosen = chooser.sample(paths, min(_FILES, len(paths)))
        modules = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in chosen}
        self._seed = seed
        self._modules = {name: usable for name, text in modules.items() if (usable := _usable(text))}
        if not self._modules:
            raise FileNotFoundError(f"there are no Python sources in {folder} to train on")

    @property
    def characters(self) -> int:
        return sum(len(text) for lines in self._modules.values() for _, text in lines)

    @property
    def modules(self) -> int:
        return len(self._modules)

    def batch(self, step: int, micro: int) -> Batch:
        """The batch of this step and micro-batch, whoever asks and in whatever order."""
        chooser = random.Random(f"{self._seed} {step} {micro}")
        module = chooser.choice(list(self._modules))
        lines = self._modules[module]
        count = min(chooser.randint(*_LINES), len(lines))
        start = chooser.randrange(len(lines) - count + 1)
        return _batch(module, lines[start : start + count])


def _usable(text: str) -> list[tuple[int, str]]:
    """Line numbers and lines, without the empty ones and without what is beyond the longest length."""
    lines = [(number, line[:LONGEST]) for number, line in enumerate(text.splitlines(), start=1)]
    return [(number, line) for number, line in lines if len(line.strip()) > 1]


def _batch(module: str, lines: list[tuple[int, str]]) -> Batch:
    texts = [(text.lstrip() + "\n").encode("ascii", "replace") for _, text in lines]
    lengths = [len(text) - 1 for text in texts]
    shape = (len(texts), max(lengths))
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(shape, dtype=torch.uint8)
    positions = torch.zeros(shape, dtype=torch.int64)
    for row, text in enumerate(texts):
        length = lengths[row]
        indent = len(lines[row][1]) - length
        characters = torch.tensor(list(text))
        tokens[row, :length] = characters[:-1]
        targets[row, :length] = characters[1:]
        positions[row, :length] = torch.arange(indent, indent + length)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return Batch(tokens, targets, mask, positions, lengths, [Line(module, number) for number, _ in lines])
