"""Settings, in rising precedence: the environment, :func:`configure`, a call's own argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from .errors import UsageError
from .scope import Scope

Trust = Literal["cluster", "restricted"]

# Far above any real message, far below what a forged size could ask for.
DEFAULT_MAX_BYTES = 1 << 38
# What the fields of a head can say.
MOST_BYTES = (1 << 63) - 1
DEFAULT_POOL_BYTES = 256 << 20


def is_seconds(value: object) -> bool:
    """Whether it is a time-out: a number that is not negative; infinity means never.

    >>> is_seconds(2.5), is_seconds(float("nan")), is_seconds(True), is_seconds("5")
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class Settings:
    """The settings in force in this process.

    Attributes:
        trust: ``"cluster"`` allows pickled leaves, as torch.distributed does; ``"restricted"`` refuses them.
        local_transport: whether ranks of one host may bypass the network stack.
        max_bytes: the largest message, head and segments together, in bytes. Both ends must agree.
        timeout: seconds; ``None`` means the group's own time-out.
        pool_bytes: how much memory of received tensors may be kept for the next ones when nothing uses it any more.
    """

    trust: Trust = "cluster"
    local_transport: bool = True
    max_bytes: int = DEFAULT_MAX_BYTES
    timeout: float | None = None
    pool_bytes: int = DEFAULT_POOL_BYTES

    def __post_init__(self) -> None:
        if self.trust not in ("cluster", "restricted"):
            raise UsageError(f"trust must be 'cluster' or 'restricted', not {self.trust!r}")
        if not isinstance(self.local_transport, bool):
            raise UsageError(f"local_transport must be True or False, not {self.local_transport!r}")
        if not isinstance(self.max_bytes, int) or isinstance(self.max_bytes, bool) or self.max_bytes <= 0:
            raise UsageError(f"max_bytes must be a positive number of bytes, not {self.max_bytes!r}")
        if self.max_bytes > MOST_BYTES:
            raise UsageError(f"max_bytes may be {MOST_BYTES} at most, not {self.max_bytes}")
        if not isinstance(self.pool_bytes, int) or isinstance(self.pool_bytes, bool) or self.pool_bytes < 0:
            raise UsageError(f"pool_bytes must be a number of bytes, 0 for none, not {self.pool_bytes!r}")
        if self.timeout is not None and not (is_seconds(self.timeout) and self.timeout > 0):
            raise UsageError(f"timeout must be a positive number of seconds or None, not {self.timeout!r}")


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read ``OBJCOMM_TRUST``, ``OBJCOMM_LOCAL_TRANSPORT``, ``OBJCOMM_MAX_BYTES``, ``OBJCOMM_TIMEOUT`` and
    ``OBJCOMM_POOL_BYTES``.

    Raises:
        UsageError: a value that cannot be read, naming the variable.

    >>> from_environment({"OBJCOMM_TIMEOUT": "30"}).timeout
    30.0
    """
    settings = Settings()
    trust = environ.get("OBJCOMM_TRUST")
    local = environ.get("OBJCOMM_LOCAL_TRANSPORT")
    try:
        if trust:
            settings = replace(settings, trust=cast(Trust, trust))
        if local:
            if local not in ("0", "1"):
                raise UsageError(f"OBJCOMM_LOCAL_TRANSPORT must be 0 or 1, not {local!r}")
            settings = replace(settings, local_transport=local == "1")
        for size in ("max_bytes", "pool_bytes"):
            name = f"OBJCOMM_{size.upper()}"
            if environ.get(name):
                settings = replace(settings, **{size: _number(name, environ, int)})  # type: ignore[arg-type]
        if environ.get("OBJCOMM_TIMEOUT"):
            settings = replace(settings, timeout=_number("OBJCOMM_TIMEOUT", environ, float))
    except UsageError as error:
        raise UsageError(f"a setting in the environment (OBJCOMM_*) is wrong: {error.text}") from None
    return settings


_N = TypeVar("_N", int, float)


def _number(name: str, environ: Mapping[str, str], kind: Callable[[str], _N]) -> _N:
    try:
        return kind(environ[name])
    except ValueError:
        raise UsageError(f"{name} is no number: {environ[name]!r}") from None


class _Unset:
    def __repr__(self) -> str:
        return "<unchanged>"


_UNSET = _Unset()
_current: Settings | None = None


def settings() -> Settings:
    """The settings in force. The environment is read at the first use, so that a program may still set it."""
    global _current
    if _current is None:
        _current = from_environment(os.environ)
    return _current


def configure(
    *,
    trust: Trust | _Unset = _UNSET,
    local_transport: bool | _Unset = _UNSET,
    max_bytes: int | _Unset = _UNSET,
    timeout: float | None | _Unset = _UNSET,
    pool_bytes: int | _Unset = _UNSET,
) -> Settings:
    """Change settings of this process; what is not named stays as it is. Returns the settings now in force.

    ``max_bytes`` is part of what two ranks agree on: change it on all ranks, at the same place in the program.

    Raises:
        UsageError: a value out of range; then nothing changes.

    >>> configure(timeout=60.0).timeout
    60.0
    >>> configure(timeout=None).timeout is None
    True
    """
    global _current
    named = {
        "trust": trust,
        "local_transport": local_transport,
        "max_bytes": max_bytes,
        "timeout": timeout,
        "pool_bytes": pool_bytes,
    }
    changes = {name: value for name, value in named.items() if value is not _UNSET}
    _current = replace(settings(), **changes)  # type: ignore[arg-type]
    return _current


_restricted: ContextVar[bool] = ContextVar("objcomm_restricted", default=False)


def restricted_trust(restricted: bool = True) -> Scope:
    """Restricted trust for the calls that are made inside, by this thread, whatever is configured.

    It belongs to a call and not to the time at which its message is taken: a receive that was made outside keeps the
    trust that is configured, and one that was made inside stays restricted whichever thread takes its message.

    >>> with restricted_trust():
    ...     trust_here()
    'restricted'
    """
    return Scope(_restricted, restricted or _restricted.get())


def is_restricted_here() -> bool:
    """Whether a call that is made now is inside of :func:`restricted_trust`."""
    return _restricted.get()


def trust_here() -> Trust:
    """The trust of a call that is made now."""
    return "restricted" if _restricted.get() else settings().trust
