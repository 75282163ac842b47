"""Code of another rank may be loaded, and modules of it made, but must not run here: it would give wrong values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

_RUNS = ("forward", "train_step", "infer_step", "sync_grad")


@dataclass(frozen=True)
class Refusal:
    """Stands for what a module that is not this rank's own must not do."""

    text: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self.text)


def refusal(what: str, here: str) -> str:
    """Why something does not run."""
    return (
        f"{what} does not run here, where {here}: its code talks to other ranks as the rank "
        f"it was generated for. Its state can be read, saved and merged"
    )


def this_rank() -> str:
    return f"this is rank {dist.get_rank()} of {dist.get_world_size()}"


def refuse_to_run(module: Any, text: str) -> None:
    """Have all raise that would run the code of a module."""
    vars(module).update({name: Refusal(text) for name in _RUNS})


def guard(cls: Any) -> None:
    """Let instances of a generated class run on the rank that it was generated for alone.

    nnScaler lets a tool make those of other ranks, too, and a class that was sent can be called wherever it arrives.
    """
    finish = getattr(cls, "_post_init", None)
    if finish is None or not isinstance(getattr(cls, "rank", None), int):
        return

    def _post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = finish(self, *args, **kwargs)
        if dist.is_initialized() and dist.get_rank() != cls.rank:
            refuse_to_run(self, refusal(f"rank {cls.rank}'s code in {cls.__module__}", this_rank()))
        return result

    cls._post_init = _post_init
