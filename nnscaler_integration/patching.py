"""Replacing functions in memory, and putting them back."""

from __future__ import annotations

import warnings
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

    # Owner, name, what was there, what was put there.
    _saved: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Replace all, or none where one fails."""
        try:
            for patch in patches:
                original = vars(patch.owner)[patch.name]
                static = isinstance(original, staticmethod)
                wrapped: Any = patch.wrapper(original.__func__ if static else original)
                replacement = staticmethod(wrapped) if static else wrapped
                setattr(patch.owner, patch.name, replacement)
                self._saved.append((patch.owner, patch.name, original, replacement))
        except BaseException:
            self.revert()
            raise

    def overridden(self) -> list[str]:
        """What somebody else has replaced since: whether the replacement here is still called, nobody can tell."""
        return [
            f"{owner.__name__}.{name} was replaced by something else after install()"
            for owner, name, _, replacement in self._saved
            if vars(owner).get(name) is not replacement
        ]

    def revert(self) -> None:
        """Put every original back, and warn of what somebody else had put there since: it is removed too."""
        for text in self.overridden():
            warnings.warn(f"{text}; that replacement is removed too", RuntimeWarning, stacklevel=3)
        while self._saved:
            owner, name, original, _ = self._saved.pop()
            setattr(owner, name, original)
