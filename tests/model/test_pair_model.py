"""Every interleaving of two ranks that exchange messages: none hangs, none loses or mixes anything up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from objcomm import EncodeError, ProtocolError
from objcomm.deadline import Deadline
from objcomm.hostmemory import view_of
from objcomm.incoming import Incoming
from objcomm.outgoing import send
from objcomm.pair import Pair
from tests.model.pair_model import (
    ERROR,
    OK,
    REFUSED,
    REMAINDER,
    SEGMENT,
    WINDOW,
    Case,
    Fault,
    Message,
    explore,
    program,
    sends_in,
)

W, R, S = WINDOW, REMAINDER, SEGMENT
KINDS = {
    "small": Message((W,)),
    "long head": Message((W, R)),
    "segments": Message((W, S, S)),
    "all": Message((W, R, S)),
    "cannot be sent": Message((W,), ERROR),
    "refused": Message((W, S), REFUSED),
    "long and refused": Message((W, R, S), REFUSED),
}
# For programs of three messages.
_FEWER = ["small", "all", "long and refused"]
PROGRAMS = {
    "one after the other": (program("send", "send", "send"), program("recv", "recv", "recv")),
    "posted ahead": (
        program("isend", "isend", "isend", "wait send 0", "wait send 1", "wait send 2"),
        program("irecv", "irecv", "irecv", "wait recv 2", "wait recv 0", "wait recv 1"),
    ),
    "waited for backwards": (
        program("isend", "isend", "wait send 1", "wait send 0"),
        program("irecv", "irecv", "wait recv 1", "wait recv 0"),
    ),
    "exchange": (
        program("irecv", "isend", "wait recv 0", "wait send 0"),
        program("irecv", "isend", "wait recv 0", "wait send 0"),
    ),
    "both send and then wait": (
        program("irecv", "send", "wait recv 0"),
        program("irecv", "send", "wait recv 0"),
    ),
    "there and back": (program("send", "recv"), program("recv", "send")),
    "1F1B": (
        program("isend", "isend", "recv", "wait send 0", "wait send 1"),
        program("irecv", "irecv", "wait recv 0", "isend", "wait recv 1", "wait send 0"),
    ),
}
TRANSPORTS = ["rendezvous", "local"]
# A thread has something to do in the background where receives are posted ahead.
_RUNS = [(name, False) for name in PROGRAMS] + [(name, True) for name in ("both send and then wait", "1F1B")]


def cases(transport: str, name: str, worker: bool, fault: str = "", wrong: str = "") -> list[Case]:
    """The programs with every choice of messages."""
    programs = PROGRAMS[name]
    counts = [sends_in(of_rank) for of_rank in programs]
    kinds = [KINDS[kind] for kind in (KINDS if sum(counts) < 3 else _FEWER)]
    if name == "both send and then wait" and not worker:
        # What is more than a window is taken by whoever waits for it, and here nobody does.
        kinds = [kind for kind in kinds if kind.parts == (W,)]
    return [
        Case(transport, programs, (messages[: counts[0]], messages[counts[0] :]), fault, wrong, worker)
        for messages in itertools.product(kinds, repeat=sum(counts))
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("name", "worker"), _RUNS)
@pytest.mark.parametrize("fault", ["", "dies", "times out"])
def test_no_interleaving_hangs_or_mixes_anything_up(transport: str, name: str, fault: str, worker: bool) -> None:
    chosen = cases(transport, name, worker, fault)
    assert sum(explore(case) for case in chosen) > 20 * len(chosen)


@pytest.mark.parametrize(
    ("wrong", "transport", "name", "fault", "found"),
    [
        ("the window is posted by the wait", "rendezvous", "both send and then wait", "", "deadlock"),
        ("what cannot be sent is not announced", "rendezvous", "waited for backwards", "", "deadlock|took the"),
        ("the window is posted in the middle of a message", "rendezvous", "posted ahead", "", "meets the receive of"),
        ("what cannot be sent is not announced", "local", "there and back", "", "deadlock|took the"),
        ("what is refused is not drained", "rendezvous", "one after the other", "", "deadlock|meets the receive of"),
        ("what is refused is not drained", "local", "posted ahead", "", "deadlock|meets the receive of"),
        ("the next window is posted before the segments", "rendezvous", "posted ahead", "", "meets the receive of"),
        ("acknowledged before it is read", "local", "one after the other", "", "has written something else"),
        ("a receive that was given up stays", "rendezvous", "one after the other", "times out", "was lost"),
    ],
)
def test_a_protocol_that_is_wrong_is_found_out(wrong: str, transport: str, name: str, fault: str, found: str) -> None:
    with pytest.raises(Fault, match=found):
        for case in cases(transport, name, "middle" in wrong, fault, wrong):
            explore(case)


# -- the code does what the model does ---------------------------------------------------------------------------------


class _Over:
    def wait(self, deadline: Deadline) -> None:
        return


class _Store:
    def check(self, keys: list[str]) -> bool:
        return False

    def set(self, key: str, value: Any) -> None:
        return

    def delete_key(self, key: str) -> bool:
        return False


class _Link:
    """Notes what is posted, and lets receives find what was sent through it."""

    rank, peer, exact, timeout, alive = 0, 1, False, 30.0, True

    def __init__(self, window: int) -> None:
        self.window = window
        self.store = _Store()
        self.sent: list[tuple[str, bytes]] = []
        self.received: list[str] = []
        self.closed = False

    def send_head(self, tensor: torch.Tensor) -> _Over:
        # A remainder comes after a full window, and nothing else does.
        full = bool(self.sent) and self.sent[-1][0] == W and len(self.sent[-1][1]) == self.window
        self.sent.append((R if full else W, bytes(view_of(tensor))))
        return _Over()

    def send_segments(self, tensors: list[torch.Tensor]) -> _Over:
        self.sent += [(S, bytes(view_of(tensor))) for tensor in tensors]
        return _Over()

    def recv_head(self, tensor: torch.Tensor) -> _Arriving:
        part = W if tensor.numel() == self.window else R
        self.received.append(part)
        return _Arriving(self, [(part, tensor)])

    def recv_segments(self, tensors: list[torch.Tensor], accelerator: list[bool]) -> _Arriving:
        self.received += [S] * len(tensors)
        return _Arriving(self, [(S, tensor) for tensor in tensors])

    def allocate(self, nbytes: int, accelerator: bool, device: torch.device | None) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        self.closed = True


class _Arriving:
    def __init__(self, link: _Link, due: list[tuple[str, torch.Tensor]]) -> None:
        self._link = link
        self._due = due

    def wait(self, deadline: Deadline) -> None:
        for part, target in self._due:
            kind, data = self._link.sent.pop(0)
            assert kind == part
            view_of(target)[: len(data)] = data


_OBJECTS: dict[str, Any] = {
    "small": [1, 2],
    "long head": ["x" * 5000],
    "segments": [torch.ones(1 << 17), torch.zeros(1 << 17)],
    "all": ["x" * 5000, torch.ones(1 << 17)],
    "refused": [torch.ones(1 << 17)],
    "long and refused": ["x" * 5000, torch.ones(1 << 17)],
}


def _pair() -> tuple[Pair, _Link]:
    link = _Link(window=4096)
    pair = Pair(link)  # type: ignore[arg-type]
    pair.agreed = True
    return pair, link


def _post(pair: Pair, kind: str) -> None:
    if KINDS[kind].outcome == ERROR:
        with pytest.raises(EncodeError):
            send([pair], _Unsendable(), "a", Deadline(5))
    else:
        send([pair], _OBJECTS[kind], "b" if KINDS[kind].outcome == REFUSED else "a", Deadline(5))


class _Unsendable:
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_posted_as_the_parts_that_the_model_has(kind: str) -> None:
    pair, link = _pair()
    _post(pair, kind)
    assert tuple(part for part, _ in link.sent) == KINDS[kind].parts


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
def test_receives_are_posted_in_the_order_of_the_model(kinds: tuple[str, str]) -> None:
    """Two posted ahead, the second waited for first: parts in order, the window of the next after the segments."""
    pair, link = _pair()
    for kind in kinds:
        _post(pair, kind)
    receives = [Incoming(pair, "a", None, None, has_handle=True) for _ in kinds]
    for incoming in receives:
        pair.expect(incoming)
    assert link.received == [W]
    for incoming, kind in reversed(list(zip(receives, kinds, strict=True))):
        wanted = KINDS[kind].outcome
        if wanted == OK:
            incoming.wait(Deadline(5))
        else:
            with pytest.raises(ProtocolError if wanted == REFUSED else Exception):
                incoming.wait(Deadline(5))
    assert link.sent == []
    assert tuple(link.received) == KINDS[kinds[0]].parts + KINDS[kinds[1]].parts
    assert not pair.posted
    assert pair.closed is None
