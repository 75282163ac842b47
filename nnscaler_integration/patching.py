"""Replacing functions in memory, and putting them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Patch:
    """One function to replace.

    Args:
        owner: the class or module that has it in its own ``__dict__``.
        name: the attribute.
        wrapper: takes the original function and returns the replacement. A static method is handed over as a function.
    """

    owner: Any
    name: str
    wrapper: Wrapper


@dataclass
class Patches:
    """The replacements that are in place, in the order in which they were made."""

    _saved: list[tuple[Any, str, Any]] = field(default_factory=list)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Replace all, or none where one fails."""
        try:
            for patch in patches:
                original = vars(patch.owner)[patch.name]
                static = isinstance(original, staticmethod)
                replacement: Any = patch.wrapper(original.__func__ if static else original)
                setattr(patch.owner, patch.name, staticmethod(replacement) if static else replacement)
                self._saved.append((patch.owner, patch.name, original))
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put every original back."""
        while self._saved:
            owner, name, original = self._saved.pop()
            setattr(owner, name, original)
