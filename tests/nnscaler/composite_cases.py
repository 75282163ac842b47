"""What a test of a composed model asks of the ranks. Imports nothing of nnScaler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Composed:
    """One configuration.

    Args:
        model: name of a class in composite_models.py.
        marked: names of classes there, or qualified names of submodules.
        policy: name of a class there.
        plan: devices of one replica.
        config: more arguments of ComputeConfig.
        seed: of the weights.
        optimizer: name of one of torch's.
    """

    model: str = "Two"
    marked: tuple[str, ...] = ("Block",)
    policy: str = "Split"
    plan: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    optimizer: str = "Adam"
