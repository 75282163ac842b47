"""The steps of a transfer, as places where a process can be made to do something: patches that a rank puts on itself.

Nothing in objcomm knows of them. All that moves between two ranks goes through a link, so patches of
:class:`objcomm.transport.routes.GroupLink` see every transfer whatever carries it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from objcomm.codec import Plan
from objcomm.deadline import Deadline
from objcomm.hostmemory import view_of
from objcomm.outgoing import Outgoing
from objcomm.pair import Pair
from objcomm.transport import local_in
from objcomm.transport.routes import GroupLink

Strike = Callable[[], None]


class Patches:
    """Attributes that were exchanged, and can be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Exchange an attribute for what ``make`` makes of it."""
        original = getattr(owner, name)
        self._before.append((owner, name, original))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        while self._before:
            owner, name, original = self._before.pop()
            setattr(owner, name, original)


def before(owner: Any, name: str) -> Callable[[Patches, Strike], None]:
    """Before a method does anything."""

    def arm(patches: Patches, strike: Strike) -> None:
        def make(original: Any) -> Any:
            def struck(*args: Any, **kwargs: Any) -> Any:
                strike()
                return original(*args, **kwargs)

            return struck

        patches.wrap(owner, name, make)

    return arm


def after(owner: Any, name: str) -> Callable[[Patches, Strike], None]:
    """After a method has returned."""

    def arm(patches: Patches, strike: Strike) -> None:
        def make(original: Any) -> Any:
            def struck(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                strike()
                return result

            return struck

        patches.wrap(owner, name, make)

    return arm


def once_over(name: str) -> Callable[[Patches, Strike], None]:
    """When the first transfer that a method of the link posts is over."""

    def arm(patches: Patches, strike: Strike) -> None:
        def make(original: Any) -> Any:
            def struck(*args: Any, **kwargs: Any) -> Any:
                pending = original(*args, **kwargs)
                pending.wait(Deadline(20))
                strike()
                return pending

            return struck

        patches.wrap(GroupLink, name, make)

    return arm


def halfway(name: str, number: int = 1) -> Callable[[Patches, Strike], None]:
    """When an eighth of what a receive takes has arrived; all bytes of what is sent are 1."""

    def arm(patches: Patches, strike: Strike) -> None:
        calls = [0]

        def make(original: Any) -> Any:
            def struck(link: Any, tensors: Any, *args: Any) -> Any:
                calls[0] += 1
                if calls[0] == number:
                    target = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
                    place = target[target.numel() // 8 :][:1]
                    place.zero_()
                    threading.Thread(target=_await, args=(place, view_of(place), strike), daemon=True).start()
                return original(link, tensors, *args)

            return struck

        patches.wrap(GroupLink, name, make)

    return arm


def _await(owner: torch.Tensor, place: memoryview, strike: Strike) -> None:
    assert owner.numel()
    end = time.monotonic() + 20
    while not place[0]:
        if time.monotonic() > end:
            return
    strike()


@dataclass(frozen=True)
class Phase:
    """A step of a transfer, as one of its two ends goes through it.

    Attributes:
        name: in words, as whoever reaches it would put it.
        arm: has ``strike`` called in this process when it is reached.
        payload: what must be on its way for the step to exist: see :func:`payload`.
        by_peer: it is reached on the other end than the one that it happens to.
    """

    name: str
    arm: Callable[[Patches, Strike], None]
    payload: str = "segment"
    by_peer: bool = False


def payload(kind: str, mib: int) -> Any:
    """An object whose memory is all ones: one that fits into a window, one with a remainder, one with a segment."""
    if kind == "small":
        return {"kind": kind, "x": torch.ones(100, dtype=torch.uint8)}
    if kind == "remainder":
        return {"kind": kind, "x": [torch.ones(1 << 18, dtype=torch.uint8) for _ in range(4 * mib)]}
    return {"kind": kind, "x": torch.ones(mib << 20, dtype=torch.uint8)}


def is_payload(obj: Any, kind: str) -> bool:
    """Whether it is what was sent."""
    tensors = obj["x"] if isinstance(obj["x"], list) else [obj["x"]]
    return bool(obj["kind"] == kind and all(bool((tensor == 1).all()) for tensor in tensors))


# Who sends is killed.
SENDER = [
    Phase("before the head", before(GroupLink, "send_head"), "small"),
    Phase("after a head that is all", once_over("send_head"), "small"),
    Phase("after the window, before the remainder", once_over("send_head"), "remainder"),
    Phase("in the middle of the remainder", halfway("recv_head", 2), "remainder", by_peer=True),
    Phase("before the segment", before(GroupLink, "send_segments")),
    Phase("in the middle of the segment", halfway("recv_segments"), by_peer=True),
    Phase("before it waits for the acknowledgement", before(Outgoing, "wait")),
]
# Who receives is killed.
RECEIVER = [
    Phase("before the window is posted", before(GroupLink, "recv_head"), "small"),
    Phase("when the head has come", after(Pair, "take_window"), "remainder"),
    Phase("in the middle of the remainder", halfway("recv_head", 2), "remainder"),
    Phase("before the segment is posted", before(GroupLink, "recv_segments")),
    Phase("in the middle of the segment", halfway("recv_segments")),
    Phase("when the segment has come", once_over("recv_segments")),
    Phase("while decoding", before(Plan, "build")),
]
# Beside those, where the receiver reads the memory of the sender.
LOCAL_RECEIVER = [Phase("before the acknowledgement", before(local_in.Inbound, "_acknowledge"))]
# Any rank of a call among several.
MEMBER = [
    Phase("before its first head", before(GroupLink, "send_head")),
    Phase("after its first head", once_over("send_head")),
    Phase("before it sends a segment", before(GroupLink, "send_segments")),
    Phase("in the middle of a segment that comes", halfway("recv_segments")),
    Phase("while decoding", before(Plan, "build")),
]
