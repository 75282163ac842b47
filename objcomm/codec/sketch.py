"""What was received, before any of its bytes are here: the structure with slots in place of tensors and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import codes, instances, skeleton
from .build import Builder
from .codes import Mark
from .form import BYTES, Form
from .memory_table import Table


@dataclass(frozen=True, eq=False)
class Slot:
    """In place of a tensor or an array that will arrive."""

    leaf: int
    form: Form

    def __str__(self) -> str:
        form = self.form
        return f"{form.dtype} of shape {list(form.shape)}"


@dataclass(frozen=True, eq=False)
class Other:
    """In place of a composite, of what is pickled, or of what numpy makes of an array."""

    name: str
    parts: list[Any]


def sketch(
    parsed: skeleton.Parsed,
    entries: Sequence[instances.Resolved],
    restricted: bool,
    table: Table | None,
    max_bytes: int,
) -> Any:
    """The structure of what is described by ``parsed``. No composite is built and nothing is unpickled."""
    if parsed.plain:
        return skeleton.unpack_plain(parsed.tree, restricted)
    forms = [] if table is None else table.forms
    slots = [b"" if form.code == BYTES else Slot(leaf, form) for leaf, form in enumerate(forms)]
    return _Sketch(parsed, entries, restricted, slots, max_bytes).build()


class _Sketch(Builder):
    def __init__(
        self,
        parsed: skeleton.Parsed,
        entries: Sequence[instances.Resolved],
        restricted: bool,
        memory: list[Any],
        max_bytes: int,
    ) -> None:
        super().__init__(parsed, entries, restricted, memory, max_bytes)
        record = Mark(lambda items: Other("numpy", items[1:]))
        self._marks = {**self._marks, codes.NUMPY_RECORD: record, codes.NUMPY_RECORD_DTYPE: record}

    def build(self) -> Any:
        parsed = self._parsed
        if parsed.names:
            self.unpack(parsed.composites)
        if parsed.stream is not None:
            self.opaque = [Other("pickle", []) for _ in range(parsed.stream.leaves)]
        self.restart()
        root = self.unpack(parsed.tree)
        return root[-1] if parsed.definitions else root

    def _define_composite(self, items: list[Any]) -> None:
        self.composites.append(Other(self._parsed.names[len(self.composites)], items[1:]))
