"""The skeletons of error and goodbye frames: what a rank tells its peer instead of an object."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from ..errors import LimitError, ObjcommError, PeerError, ProtocolError

# A notice always fits in the smallest window: nothing may follow it.
_MAX_TEXT = 2048
_MAX_PATH = 512


@dataclass(frozen=True)
class Notice:
    """Why there is no object.

    Attributes:
        error: name of the exception's class on the rank that failed; empty in a goodbye.
        text: what happened, in a sentence.
        path: where in the object; empty where it does not apply.
    """

    error: str
    text: str
    path: str = ""


def _shorten(text: str, limit: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded.decode() if len(encoded) <= limit else encoded[: limit - 3].decode("utf-8", "ignore") + "..."


def notice_of(error: BaseException) -> Notice:
    """What to tell the peer of an exception that kept an object from being sent."""
    if isinstance(error, ObjcommError):
        return Notice(type(error).__name__, error.text, error.path or "")
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as failure:  # a class of the program, and it must not keep the peer from being told
        text = f"its text cannot be had: {type(failure).__name__}"
    return Notice(name, text or name)


def pack_notice(notice: Notice) -> bytes:
    """A notice as the skeleton of an error or goodbye frame, at most 3 KiB."""
    fields = [
        _shorten(notice.error, 128),
        _shorten(notice.text, _MAX_TEXT),
        _shorten(notice.path, _MAX_PATH),
    ]
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack_notice(skeleton: memoryview) -> Notice:
    """Read :func:`pack_notice`'s bytes.

    Raises:
        ProtocolError: they are none.
    """
    try:
        fields = msgpack.unpackb(skeleton)
    except Exception as error:
        raise ProtocolError(f"a damaged notice arrived: {error}") from error
    if not isinstance(fields, list) or len(fields) != 3 or not all(isinstance(field, str) for field in fields):
        raise ProtocolError("a damaged notice arrived: it does not hold three strings")
    return Notice(*fields)


def error_of(notice: Notice, peer: int) -> ObjcommError:
    """The exception that the receiver of an error frame raises."""
    path = notice.path or None
    if notice.error == LimitError.__name__:
        return LimitError(f"rank {peer} could not send: {notice.text}", path=path)
    return PeerError(
        f"rank {peer} could not send its object: {notice.error}: {notice.text}",
        path=path,
        hint="the error is raised on that rank too; the pair stays usable",
    )
