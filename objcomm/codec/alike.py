"""Tensors that look like those of an earlier message: torch itself compares them, all in one call.

torch.compile has to know whether what it compiled still fits the tensors of a call, and compares type, dispatch keys,
dtype, device, ``requires_grad``, shape and strides of each in C++. Asked for these from Python one by one, a thousand
tensors take ten times as long.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .form import Form, longest
from .kept import Kept
from .ordinary import Ordinary
from .tensors import number_of

_C: Any = torch._C

# Fewer are looked at one by one in less time than it takes to find out what they are like.
FEWEST = 16
_MOST = 1 << 16


class Pattern:
    """What the tensors of a message look like.

    Attributes:
        forms: of each its form. Nobody changes the list.
        longest: of their hulls, in bytes.
    """

    __slots__ = ("_check", "forms", "longest")

    def __init__(self, forms: list[Form]) -> None:
        self.forms = forms
        self.longest = longest(forms)
        self._check: Callable[..., bool] | None = None

    def learn(self, found: list[torch.Tensor]) -> None:
        """Find out how to recognize the like of ``found``, which have this pattern."""
        if self._check is None and _tells_apart():
            self._check = _guards(found).check

    def fits(self, found: list[torch.Tensor]) -> bool:
        """Whether as many tensors are the like of those that the pattern was learned from."""
        return self._check is not None and self._check(*found)


# The dispatch keys that a thread adds or hides are part of a comparison, so those of other threads prove nothing.
_patterns: Kept[Hashable, Pattern] = Kept(32)


def known(found: list[torch.Tensor]) -> Pattern | None:
    """The pattern of earlier tensors that are like these: plain, on the CPU, of the same forms; ``None`` if none is."""
    if not FEWEST <= len(found) <= _MOST:
        return None
    pattern = _patterns.get(_key(found))
    return pattern if pattern is not None and pattern.fits(found) else None


def remember(found: list[torch.Tensor], forms: list[Form]) -> None:
    """Note the forms of plain tensors on the CPU. What comes for a second time is worth recognizing."""
    if not FEWEST <= len(found) <= _MOST:
        return
    key = _key(found)
    pattern = _patterns.get(key)
    if pattern is not None and pattern.forms == forms:
        pattern.learn(found)
    else:
        _patterns.keep(key, Pattern(forms))


def _key(found: list[torch.Tensor]) -> Hashable:
    """The same for what may be alike, and different for most of what is not."""
    # What this thread adds to the dispatch keys of every tensor, and what it hides of them.
    added, hidden = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return len(found), found[0].shape, found[-1].shape, number_of(added), number_of(hidden)


def _guards(found: list[torch.Tensor]) -> Any:
    shapes = [list(tensor.shape) for tensor in found]
    strides = [list(tensor.stride()) for tensor in found]
    return _C._dynamo.guards.TensorGuards(*found, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


@functools.cache
def _tells_apart() -> bool:
    """Whether this torch compares as expected. It is no public part of torch, so each property is tried once."""
    with contextlib.suppress(Exception), Ordinary():
        base = torch.zeros(2, 2, device="cpu")
        guards = _guards([base])
        others = [
            base.double(),
            base.t().contiguous().t(),
            torch.zeros(2, 3, device="cpu"),
            torch.zeros(4, device="cpu"),
            base.clone().requires_grad_(),
            torch.nn.Parameter(base, requires_grad=False),
            base._neg_view(),
            torch.zeros(2, 2, dtype=torch.complex64, device="cpu"),
            torch.zeros(2, 2, device="meta"),
        ]
        conjugate = torch.zeros(2, 2, dtype=torch.complex64, device="cpu")
        return (
            guards.check(base.clone())
            and not any(map(guards.check, others))
            and not _guards([conjugate]).check(conjugate.conj())
        )
    return False
