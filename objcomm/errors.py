"""The exceptions of objcomm: one small tree, each saying which rank, peer, channel, phase and path."""

from __future__ import annotations

import copy
from typing import ClassVar, TypeVar

_E = TypeVar("_E", bound="ObjcommError")


class ObjcommError(RuntimeError):
    """Base of every error that objcomm raises.

    The context is kept in attributes of the same names, each ``None`` where it does not apply.

    Args:
        text: what happened, in one sentence without a final full stop.
        rank: global rank of this process.
        peer: global rank at the other end.
        channel: name of the channel that the transfer uses.
        phase: what was being done: ``"encode"``, ``"handshake"``, ``"head"``, ``"segments"``, ``"send"``, ``"decode"``.
        path: where in the object, as Python would write it: ``obj['cfg'].layers[3]``.
        hint: what to do about it.

    >>> str(EncodeError("a lock cannot be pickled", path="obj['lock']", rank=0))
    "a lock cannot be pickled [path obj['lock'], rank 0]"
    """

    # What to do where nobody knew anything better; it needs to know the peer.
    _advice: ClassVar[str] = ""

    def __init__(
        self,
        text: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        channel: str | None = None,
        phase: str | None = None,
        path: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.rank = rank
        self.peer = peer
        self.channel = channel
        self.phase = phase
        self.path = path
        self.hint = hint

    def locate(
        self: _E,
        *,
        rank: int | None = None,
        peer: int | None = None,
        channel: str | None = None,
        phase: str | None = None,
    ) -> _E:
        """Fill in the context that is not set yet and return the same error: lower layers do not know all of it."""
        self.rank = rank if self.rank is None else self.rank
        self.peer = peer if self.peer is None else self.peer
        self.channel = channel if self.channel is None else self.channel
        self.phase = phase if self.phase is None else self.phase
        return self

    def kept(self: _E) -> _E:
        """The same error for whoever keeps it: without the frames that it went through, and all that these hold."""
        return copy.copy(self)

    def __str__(self) -> str:
        context = [
            f"{name} {value!r}" if name == "channel" else f"{name} {value}"
            for name, value in (
                ("path", self.path),
                ("rank", self.rank),
                ("peer", self.peer),
                ("channel", self.channel),
                ("phase", self.phase),
            )
            if value is not None and not (name == "channel" and value == "")
        ]
        where = f" [{', '.join(context)}]" if context else ""
        hint = self.hint or ("" if self.peer is None else self._advice.format(peer=self.peer))
        what_to_do = f"; {hint}" if hint else ""
        return f"{self.text}{where}{what_to_do}"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.text,), self.__dict__)


class EncodeError(ObjcommError):
    """The object cannot be sent. Nothing of it left this rank; the receiver gets a :class:`PeerError`."""


class DecodeError(ObjcommError):
    """The object arrived whole but cannot be rebuilt here. The pair stays usable."""


class ProtocolError(ObjcommError):
    """The two ends disagree: another channel, sequence number, protocol version or setting, or a damaged frame."""


class PeerError(ObjcommError):
    """The other end failed: it could not encode, it left, it died, or the connection to it is closed."""

    _advice = "what rank {peer} itself raised or printed says why"


class TrustError(ObjcommError):
    """Restricted trust refuses what was sent, or asked to be sent: nothing was unpickled, imported or executed."""


class LimitError(ObjcommError):
    """The message is larger than ``max_bytes`` allows."""


class TransferTimeout(ObjcommError, TimeoutError):
    """The other end did not answer in time."""

    _advice = (
        "either rank {peer} makes no call that matches this one, and the report on stderr says what is known of it, or "
        "it needs longer: timeout="
    )


class UsageError(ObjcommError, ValueError):
    """The call itself is wrong: a rank outside the group, both ``src`` and ``group_src``, and the like."""
