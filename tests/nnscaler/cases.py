"""What a test asks of the ranks, and what they answer. Imports nothing of nnScaler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        model: name of a class in models.py.
        arguments: of its constructor.
        policy: name in policies.py and its arguments, or the name of one of nnScaler's own.
        plan: devices of one replica.
        samples: for one step and replica: as many as micro-batches with a schedule.
        config: more arguments of ComputeConfig.
        infer_only: generate for inference.
        installed: with the integration.
        asynchronous: as with ASYNC_COMM; "objects" for theirs only.
        steps: training steps.
    """

    model: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    plan: int = 2
    samples: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    infer_only: bool = False
    installed: bool = True
    object_outputs: bool = False
    asynchronous: bool | str = False
    steps: int = 1


@dataclass
class Outcome:
    """What one rank saw."""

    code: str
    loss: float
    gradients: int
    outputs: Any = None
    calls: list[Any] = field(default_factory=list)
