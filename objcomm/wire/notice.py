"""The skeletons of error and goodbye frames: what a rank tells its peer instead of an object."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from ..errors import LimitError, ObjcommError, PeerError, ProtocolError, TransferTimeout
from ..packed import printable, read_whole

# A notice always fits in the smallest window: nothing may follow it.
_MAX_TEXT = 2048
_MAX_PATH = 512
_MAX_BYTES = 4096
_FIELDS = ([str, str, str], [str, str, str, int])


@dataclass(frozen=True)
class Notice:
    """Why there is no object.

    Attributes:
        error: name of the exception's class on the rank that failed; empty in a goodbye.
        text: what happened, in a sentence.
        path: where in the object; empty where it does not apply.
        rank: global rank that failed; ``None`` is the one that sends the notice.
    """

    error: str
    text: str
    path: str = ""
    rank: int | None = None


def _shorten(text: str, limit: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded.decode() if len(encoded) <= limit else encoded[: limit - 3].decode("utf-8", "ignore") + "..."


def notice_of(error: BaseException, rank: int | None = None) -> Notice:
    """What to tell the peer of an exception that kept an object from being sent; ``rank`` is where it was raised."""
    if isinstance(error, ObjcommError):
        return Notice(type(error).__name__, error.text, error.path or "", rank)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as failure:  # a class of the program, and it must not keep the peer from being told
        text = f"its text cannot be had: {type(failure).__name__}"
    return Notice(name, text or name, "", rank)


def pack_notice(notice: Notice) -> bytes:
    """A notice as the skeleton of an error or goodbye frame, at most 3 KiB."""
    fields = [
        _shorten(notice.error, 128),
        _shorten(notice.text, _MAX_TEXT),
        _shorten(notice.path, _MAX_PATH),
        *([] if notice.rank is None else [notice.rank]),
    ]
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack_notice(skeleton: memoryview) -> Notice:
    """Read :func:`pack_notice`'s bytes.

    Raises:
        ProtocolError: they are none.
    """
    try:
        if len(skeleton) > _MAX_BYTES:
            raise ValueError(f"{len(skeleton)} bytes")
        fields = read_whole(skeleton)
    except Exception as error:
        raise ProtocolError(f"a damaged notice arrived: {error}") from error
    if not isinstance(fields, list) or [type(field) for field in fields] not in _FIELDS:
        raise ProtocolError("a damaged notice arrived: it does not hold three strings, or three and a rank")
    name, text, path, *rank = fields
    return Notice(printable(name), printable(text), printable(path), *rank)


def error_of(notice: Notice, peer: int) -> ObjcommError:
    """The exception that the receiver of a notice raises: of ``peer``, unless the notice names another rank."""
    path = notice.path or None
    rank = peer if notice.rank is None else notice.rank
    if notice.error == LimitError.__name__:
        return LimitError(f"rank {rank} could not send: {notice.text}", path=path, peer=rank)
    if notice.error == TransferTimeout.__name__:
        return TransferTimeout(notice.text, path=path, peer=rank)
    if notice.error == PeerError.__name__:
        return PeerError(notice.text, path=path, peer=rank)
    return PeerError(
        f"rank {rank} could not send its object: {notice.error}: {notice.text}",
        path=path,
        peer=rank,
        hint="the error is raised on that rank too; the pair stays usable",
    )
