"""Two ranks, the transfers between them, and every order in which things may happen.

The model is the part of docs/protocol.md that could hang, lose or mix up messages: windows, remainders, segments,
receives that are posted ahead, error frames, messages that are refused and drained, acknowledgements, a rank that
gives up, a rank that dies. Bytes are left out: a transfer is the number of its message and its part of it.

Two transports: ``"rendezvous"``, where a send is over when a receive has matched it, as on gloo and NCCL; ``"local"``,
where a record is over when the socket has it, and a segment is read from the sender's memory and then acknowledged.
Transfers match in the order of posting, whatever they are: matching one with a receive for another is a fault, since it
ends a process on gloo and mixes data elsewhere.

``explore`` goes breadth first through all states that can be reached from a start, with no reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

WINDOW, REMAINDER, SEGMENT = "window", "remainder", "segment"
OK, ERROR, REFUSED = "object", "error frame", "refused"
# Records that the socket of a direction has room for.
ROOM = 2


class Message(NamedTuple):
    """What a message consists of, and what becomes of it at the receiver."""

    parts: tuple[str, ...]
    outcome: str = OK


class Case(NamedTuple):
    """A start.

    Attributes:
        programs: of each rank the operations of its thread, see ``_steps_of_program``.
        messages: of each rank what it sends, in order.
        fault: what may happen once at any point: ``""``, ``"dies"`` (rank 0), ``"times out"`` (either rank).
        worker: a thread of each rank moves receives on as soon as they are posted; without it, whoever waits for one.
        wrong: a known mistake, for the model itself to be tested; ``""`` is the protocol.
    """

    transport: str
    programs: tuple[tuple[tuple[str, int], ...], ...]
    messages: tuple[tuple[Message, ...], ...]
    fault: str = ""
    wrong: str = ""
    worker: bool = False


class Side(NamedTuple):
    """What one rank knows. Receives are numbered like the messages that they are for.

    Attributes:
        at: the next operation of its program.
        posted: receives that are not over; the first is the one being served.
        window: the window is posted and not taken.
        phase: of the message that is being received.
        sent: messages that were posted.
        results: of each receive that is over, how.
        failed: receives that were given up.
        closed: the connection is; what lies in its socket can still be taken.
        gone: this rank has seen that, and exchanges nothing any more.
        reused: messages whose memory the program has written to since.
    """

    at: int = 0
    posted: tuple[int, ...] = ()
    window: bool = False
    phase: tuple[str, int, int] | None = None  # what is waited for, message, how many of them
    sent: int = 0
    results: tuple[tuple[int, str], ...] = ()
    failed: tuple[int, ...] = ()
    closed: bool = False
    gone: bool = False
    dead: bool = False
    reused: tuple[int, ...] = ()


class Wire(NamedTuple):
    """One direction: transfers as (message, part).

    Attributes:
        sends: posted, and not matched; receives: likewise.
        arrived: matched, and not taken by the receiver.
        unread: segments that were acknowledged before they were read; only a wrong protocol has any.
        pending: of each message the transfers that its sender still has to wait for.
    """

    sends: tuple[tuple[int, str], ...] = ()
    receives: tuple[str, ...] = ()
    arrived: tuple[tuple[int, str], ...] = ()
    unread: tuple[tuple[int, str], ...] = ()
    pending: tuple[int, ...] = ()


class State(NamedTuple):
    sides: tuple[Side, Side] = (Side(), Side())
    wires: tuple[Wire, Wire] = (Wire(), Wire())
    faulty: bool = False

    def side(self, rank: int, **changes: Any) -> State:
        changed, other = self.sides[rank]._replace(**changes), self.sides[1 - rank]
        return self._replace(sides=(changed, other) if rank == 0 else (other, changed))

    def wire(self, rank: int, **changes: Any) -> State:
        changed, other = self.wires[rank]._replace(**changes), self.wires[1 - rank]
        return self._replace(wires=(changed, other) if rank == 0 else (other, changed))


class Fault(Exception):
    """A state that must not be, and the way there."""


def explore(case: Case) -> int:
    """Visit every state; returns how many there are.

    Raises:
        Fault: one of them is a deadlock, a transfer was mismatched, or a message was lost, mixed up or read too late.
    """
    start = State()
    seen: dict[State, tuple[State, str] | None] = {start: None}
    frontier = [start]
    while frontier:
        following: list[State] = []
        for state in frontier:
            try:
                successors = list(_steps(case, state))
                if not successors:
                    _check_end(case, state)
            except Fault as fault:
                raise Fault(f"{fault}\n{case}\n{_way_to(state, seen)}") from None
            for name, successor in successors:
                if successor not in seen:
                    seen[successor] = state, name
                    following.append(successor)
        frontier = following
    return len(seen)


def _way_to(state: State, seen: dict[State, tuple[State, str] | None]) -> str:
    names: list[str] = []
    before = seen[state]
    while before is not None:
        names.append(before[1])
        before = seen[before[0]]
    return "\n".join(reversed(names))


def _check_end(case: Case, state: State) -> None:
    for rank, side in enumerate(state.sides):
        if not side.dead and side.at < len(case.programs[rank]):
            raise Fault(f"deadlock: rank {rank} waits for ever in {case.programs[rank][side.at]}")
        wanted = [number for name, number in case.programs[rank] if name == "irecv"]
        if not state.faulty and [number for number, _ in side.results] != wanted:
            raise Fault(f"rank {rank} got {side.results} where {wanted} were due")


def _steps(case: Case, state: State) -> Iterator[tuple[str, State]]:
    for rank in (0, 1):
        yield from _steps_of_program(case, state, rank)
        if case.worker and state.sides[rank].posted and not state.sides[rank].dead:
            yield from _receive(case, state, rank, f"rank {rank}")
        yield from _steps_of_wire(case, state, rank)
    if not case.fault or state.faulty:
        return
    if case.fault == "dies":
        yield "rank 0 dies", state.side(0, dead=True).side(1, closed=True)._replace(faulty=True)
    for rank in (0, 1) if case.fault == "times out" else ():
        yield from _time_out(case, state, rank)


def _time_out(case: Case, state: State, rank: int) -> Iterator[tuple[str, State]]:
    side = state.sides[rank]
    if side.at == len(case.programs[rank]):
        return
    name, number = case.programs[rank][side.at]
    if name not in ("wait send", "wait recv"):
        return
    if case.wrong == "a receive that was given up stays":
        if name == "wait recv" and side.phase == (WINDOW, number, 1):
            left = state.side(rank, at=side.at + 1, failed=(*side.failed, number))
            yield f"rank {rank} gives {name} {number} up", left._replace(faulty=True)
        return
    # Which of them was late cannot be known: the order is lost for both.
    closed = state.side(rank, closed=True, gone=True).side(1 - rank, closed=True)
    yield f"rank {rank} gives {name} {number} up", closed._replace(faulty=True)


# -- the program of a rank ---------------------------------------------------------------------------------------------


def _steps_of_program(case: Case, state: State, rank: int) -> Iterator[tuple[str, State]]:
    """``isend n``, ``wait send n``, ``reuse n`` (write to its memory), ``irecv n``, ``wait recv n``."""
    side = state.sides[rank]
    if side.dead or side.at == len(case.programs[rank]):
        return
    name, number = case.programs[rank][side.at]
    label = f"rank {rank}: {name} {number}"
    done = state.side(rank, at=side.at + 1)
    if name == "isend":
        yield label, done if side.closed else _post(case, done, rank, number)
    elif name == "wait send":
        pending = state.wires[rank].pending
        if side.closed or number >= len(pending) or not pending[number]:
            yield label, done
    elif name == "reuse":
        yield label, done.side(rank, reused=(*side.reused, number))
    elif name == "irecv":
        if side.closed:
            yield label, done.side(rank, results=(*side.results, (number, "closed")))
        else:
            queued = done.side(rank, posted=(*side.posted, number))
            # Not while a message is being taken: its own receives come first.
            busy = side.phase is not None and case.wrong != "the window is posted in the middle of a message"
            by_wait = case.wrong == "the window is posted by the wait"
            yield label, queued if busy or by_wait else _post_window(queued, rank)
    elif any(over == number for over, _ in side.results) or number in side.failed:
        yield label, done
    elif not case.worker:
        yield from _receive(case, state, rank, label)


def _post(case: Case, state: State, rank: int, number: int) -> State:
    message = case.messages[rank][number]
    if message.outcome == ERROR and case.wrong == "what cannot be sent is not announced":
        return state.wire(rank, pending=(*state.wires[rank].pending, 0))
    wire = state.wires[rank]
    parts = tuple((number, part) for part in message.parts)
    pending = len(parts)
    if case.transport == "local":
        # What fits into the socket is over at once; the rest when it has moved up.
        posted = wire.sends + parts
        pending -= sum(part != SEGMENT for _, part in posted[len(wire.sends) : ROOM])
    return state.wire(rank, sends=wire.sends + parts, pending=(*wire.pending, pending)).side(
        rank, sent=state.sides[rank].sent + 1
    )


def _post_window(state: State, rank: int) -> State:
    if state.sides[rank].window or not state.sides[rank].posted:
        return state
    wire = state.wires[1 - rank]
    return state.wire(1 - rank, receives=(*wire.receives, WINDOW)).side(rank, window=True)


def _receive(case: Case, state: State, rank: int, label: str) -> Iterator[tuple[str, State]]:
    """One step of whoever moves the receives of a rank on."""
    side, wire = state.sides[rank], state.wires[1 - rank]
    if side.gone:
        yield f"{label} fails", _finish(state, rank, "closed")
        return
    if side.phase is None:
        if side.closed and not wire.arrived:
            yield f"{label} fails", _finish(state.side(rank, gone=True), rank, "closed")
        elif not side.closed:
            due = side.posted[0]
            yield f"{label}: window for {due}", _post_window(state, rank).side(rank, phase=(WINDOW, due, 1))
        else:
            yield f"{label}: what has arrived", state.side(rank, phase=(WINDOW, side.posted[0], 1))
        return
    part, number, left = side.phase
    if not wire.arrived:
        if side.closed:
            yield f"{label} fails", _finish(state.side(rank, gone=True), rank, "closed")
        return
    came, kind = wire.arrived[0]
    if (came, kind) != (number, part):
        raise Fault(f"rank {rank} took the {kind} of message {came} for the {part} of message {number}")
    taken = state.wire(1 - rank, arrived=wire.arrived[1:])
    if part == WINDOW:
        taken = taken.side(rank, window=False)
    yield f"{label}: {part} of {number}", _go_on(case, taken, rank, part, number, left - 1)


def _go_on(case: Case, state: State, rank: int, part: str, number: int, left: int) -> State:
    if left:
        return state.side(rank, phase=(part, number, left))
    message = case.messages[1 - rank][number]
    if part == WINDOW and REMAINDER in message.parts:
        return _expect(state, rank, REMAINDER, number, 1)
    segments = message.parts.count(SEGMENT)
    drained = message.outcome != REFUSED or case.wrong != "what is refused is not drained"
    if part != SEGMENT and segments and drained:
        if case.wrong == "the next window is posted before the segments" and len(state.sides[rank].posted) > 1:
            state = _post_window(state, rank)
        state = _expect(state, rank, SEGMENT, number, segments)
        # Posted ahead: every receive of this message is.
        return _post_window(state, rank) if len(state.sides[rank].posted) > 1 else state
    return _finish(state, rank, message.outcome)


def _expect(state: State, rank: int, part: str, number: int, count: int) -> State:
    wire = state.wires[1 - rank]
    return state.wire(1 - rank, receives=wire.receives + (part,) * count).side(rank, phase=(part, number, count))


def _finish(state: State, rank: int, outcome: str) -> State:
    side = state.sides[rank]
    number, posted = side.posted[0], side.posted[1:]
    if number in side.failed:
        raise Fault(f"message {number} was lost: rank {rank} had given it up, and the pair goes on")
    over = state.side(rank, posted=posted, phase=None, results=(*side.results, (number, outcome)))
    # For a receive that was queued meanwhile.
    return over if side.closed or side.gone else _post_window(over, rank)


# -- a direction -------------------------------------------------------------------------------------------------------


def _steps_of_wire(case: Case, state: State, rank: int) -> Iterator[tuple[str, State]]:
    wire, sender = state.wires[rank], state.sides[rank]
    if wire.unread:
        number, part = wire.unread[0]
        if number in sender.reused:
            raise Fault(f"a {part} of message {number} is read when its sender has written something else there")
        yield (
            f"{part} of {number} is read",
            state.wire(rank, unread=wire.unread[1:], arrived=(*wire.arrived, wire.unread[0])),
        )
        return
    if not (wire.sends and wire.receives):
        return
    (number, part), wanted = wire.sends[0], wire.receives[0]
    # A closed connection moves nothing but what is in its socket already.
    if (sender.closed or state.sides[1 - rank].closed) and (case.transport != "local" or part == SEGMENT):
        return
    if part != wanted:
        raise Fault(f"the {part} of message {number} meets the receive of a {wanted}")
    if part == SEGMENT and number in sender.reused:
        raise Fault(f"a {part} of message {number} is read when its sender has written something else there")
    pending = list(wire.pending)
    if case.transport != "local" or part == SEGMENT:
        pending[number] -= 1
    if case.transport == "local":
        # The record that now has room in the socket.
        moved = wire.sends[ROOM : ROOM + 1]
        if moved and moved[0][1] != SEGMENT:
            pending[moved[0][0]] -= 1
    matched = state.wire(rank, sends=wire.sends[1:], receives=wire.receives[1:], pending=tuple(pending))
    if case.wrong == "acknowledged before it is read" and part == SEGMENT:
        yield f"{part} of {number} is acknowledged", matched.wire(rank, unread=(wire.sends[0],))
    else:
        yield f"{part} of {number} moves", matched.wire(rank, arrived=(*wire.arrived, wire.sends[0]))


def program(*operations: str) -> tuple[tuple[str, int], ...]:
    """Operations as ``isend``, ``send`` (and its wait and a reuse), ``irecv``, ``recv``, ``wait recv 1``.

    >>> program("send", "recv")
    (('isend', 0), ('wait send', 0), ('reuse', 0), ('irecv', 0), ('wait recv', 0))
    """
    found: list[tuple[str, int]] = []
    sent = received = 0
    for operation in operations:
        name, _, number = operation.rpartition(" ")
        if operation == "isend":
            found.append(("isend", sent))
        elif operation == "send":
            found += [("isend", sent), ("wait send", sent), ("reuse", sent)]
        elif operation == "irecv":
            found.append(("irecv", received))
        elif operation == "recv":
            found += [("irecv", received), ("wait recv", received)]
        else:
            found.append((name, int(number)))
            if name == "wait send":
                found.append(("reuse", int(number)))
        sent += operation in ("isend", "send")
        received += operation in ("irecv", "recv")
    return tuple(found)


def sends_in(operations: Sequence[tuple[str, int]]) -> int:
    return sum(name == "isend" for name, _ in operations)
