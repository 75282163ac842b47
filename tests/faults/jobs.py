"""Many faults in one job: small teams side by side, each of which loses a member, goes on in a new group, and so on.

The members that stay are the same processes from the first fault of a team to the last, so that whatever a fault
leaves behind adds up, and is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import objcomm
from tests.faults.phases import Patches, Phase
from tests.process import descriptors, sockets
from tests.ranks import run_ranks

TRANSPORTS = ["gloo", "strict", "local"]
# How long an error may take. Calls before it may go well: what was on its way when the peer died arrives, and what is
# small leaves without the peer.
BOUND_SECONDS = 10.0
# The time-out of a call; a transfer over gloo that broke in the middle holds its thread for as long.
CALL_SECONDS = 8.0
# A group that failed is let go of by a thread that looks for such every two seconds.
SWEEP_SECONDS = 2.5
_TIME = struct.Struct("<d")
_MOST_FAULTS = 64


@dataclass(frozen=True)
class Fault:
    """What happens to one member of a team, and where.

    Attributes:
        victim: its rank.
        call: makes the call, given this rank; raises AssertionError if what it brings is wrong.
    """

    name: str
    victim: int
    phase: Phase
    call: Callable[[int], None]


@dataclass(frozen=True)
class Team:
    """Faults that happen one after the other, among ``size`` ranks."""

    name: str
    size: int
    faults: Sequence[Fault]


@dataclass
class Outcome:
    """What one survivor saw of a fault.

    Attributes:
        seconds: from the blow to the error; ``None`` if there was no blow.
        problems: what was not as promised.
    """

    rank: int
    seconds: float | None = None
    error: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What became of the faults of one transport.

    Attributes:
        outcomes: what the survivors saw, by the names of team and fault.
        held: what each survivor held before its first fault and after its last, by the name of its team.
    """

    outcomes: dict[tuple[str, str], list[Outcome]] = field(default_factory=dict)
    held: dict[str, list[tuple[dict[str, int], dict[str, int]]]] = field(default_factory=dict)

    def problems(self, team: str, fault: str) -> list[str]:
        """What was not as promised, on any of the survivors."""
        seen = self.outcomes[team, fault]
        assert seen
        return [f"rank {outcome.rank}: {problem}" for outcome in seen for problem in outcome.problems]


def run_teams(transport: str, teams: Sequence[Team], timeout: float = 150.0) -> Report:
    """Let all faults of all teams happen."""
    places: list[tuple[int, int]] = []  # of each rank its team, and its number in it: the last one makes the victims
    for number, team in enumerate(teams):
        places += [(number, place) for place in range(team.size)]
    with tempfile.NamedTemporaryFile(prefix="blows-") as blows:
        blows.truncate(_TIME.size * _MOST_FAULTS * len(teams))
        path = blows.name

        def member(rank: int) -> Any:
            number, place = places[rank]
            return Member(transport, number, teams[number], path).live(place)

        local = "1" if transport == "local" else "0"
        env = {
            "OBJCOMM_LOCAL_TRANSPORT": local,
            "OBJCOMM_POOL_BYTES": "0",
            "LOCAL_WORLD_SIZE": str(len(places)),
        }
        results = run_ranks(member, len(places), backend=None, timeout=timeout, env=env)
    report = Report()
    for (number, _), result in zip(places, results, strict=True):
        if result is not None:
            seen, before, after = result
            team = teams[number]
            report.held.setdefault(team.name, []).append((before, after))
            for fault, outcome in zip(team.faults, seen, strict=True):
                report.outcomes.setdefault((team.name, fault.name), []).append(outcome)
    return report


@functools.cache
def report_of(transport: str, teams: Callable[[str], Sequence[Team]]) -> Report:
    """What became of the teams of one transport; they are run when it is asked for the first time."""
    return run_teams(transport, teams(transport))


def cases(teams: Callable[[str], Sequence[Team]]) -> list[tuple[str, str, str]]:
    """Transport, team and fault, of all there are."""
    return [
        (transport, team.name, fault.name)
        for transport in TRANSPORTS
        for team in teams(transport)
        for fault in team.faults
    ]


def check_held(report: Report, memory: int) -> None:
    """Whether survivors hold no more after all faults than before, but for so many bytes, and what is made once."""
    for team, survivors in report.held.items():
        for before, after in survivors:
            more = {name: after[name] - before[name] for name in before}
            # A group that is kept has ten descriptors, six or more of them sockets.
            assert more["descriptors"] <= 6, (team, before, after)
            assert more["sockets"] <= 2, (team, before, after)
            assert more["threads"] <= 0 and more["children"] <= 0, (team, before, after)
            assert more["memory"] < memory, (team, before, after)


class Member:
    """One process of a team: a survivor of all its faults, or the one that makes their victims."""

    def __init__(self, transport: str, number: int, team: Team, blows: str) -> None:
        self._transport = transport
        self._number = number
        self._team = team
        self._blows = os.open(blows, os.O_RDWR)
        self._store: Any = None

    def live(self, place: int) -> tuple[list[Outcome], dict[str, int], dict[str, int]] | None:
        faults = self._team.faults
        if place == self._team.size - 1:
            for at, fault in enumerate(faults):
                self._make_victim(at, fault)
            return None
        self._connect()
        before = held(at_once=True)
        return [self._survive(at, fault, place) for at, fault in enumerate(faults)], before, held()

    def _make_victim(self, at: int, fault: Fault) -> None:
        """In a child, since that costs less than a rank. This process uses neither torch's groups nor objcomm."""
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(120)
                self._connect()
                self._die(at, fault)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(7)
        os.waitpid(child, 0)

    def _connect(self) -> None:
        if self._transport == "strict":
            importlib.import_module("tests.strict_backend")
        self._store = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False, timeout=timedelta(seconds=150)
        )

    def _join(self, at: int, rank: int) -> None:
        store = dist.PrefixStore(f"fault {self._number} {at}", self._store)
        backend = "strict" if self._transport == "strict" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=self._team.size, timeout=timedelta(seconds=25)
        )
        # Everybody gets to know everybody before anything happens.
        pids = objcomm.all_gather_objects(os.getpid())
        self._pids: list[int] = pids
        objcomm.all_to_all_objects([None] * self._team.size)

    def _struck_at(self, at: int) -> float:
        return float(
            _TIME.unpack(os.pread(self._blows, _TIME.size, _TIME.size * (_MOST_FAULTS * self._number + at)))[0]
        )

    def _strike(self, at: int, pid: int) -> None:
        if not self._struck_at(at):
            os.pwrite(self._blows, _TIME.pack(time.monotonic()), _TIME.size * (_MOST_FAULTS * self._number + at))
            os.kill(pid, signal.SIGKILL)

    def _die(self, at: int, fault: Fault) -> None:
        self._join(at, fault.victim)
        if not fault.phase.by_peer:
            fault.phase.arm(Patches(), lambda: self._strike(at, os.getpid()))
        with contextlib.suppress(objcomm.ObjcommError):
            fault.call(fault.victim)
        # By now whoever was to strike has done so; if not, the survivors say so.
        time.sleep(1.0 if fault.phase.by_peer else 0.0)

    def _survive(self, at: int, fault: Fault, place: int) -> Outcome:
        rank = place if place < fault.victim else place + 1
        outcome = Outcome(rank)
        patches = Patches()
        try:
            self._join(at, rank)
            if fault.phase.by_peer:
                fault.phase.arm(patches, lambda: self._strike(at, self._pids[fault.victim]))
            self._see(at, fault, rank, outcome)
        except Exception:
            outcome.problems.append(traceback.format_exc())
        patches.undo()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._pids = []
        return outcome

    def _see(self, at: int, fault: Fault, rank: int, outcome: Outcome) -> None:
        end = time.monotonic() + 2 * BOUND_SECONDS
        while time.monotonic() < end:
            try:
                fault.call(rank)
            except objcomm.ObjcommError as error:
                now = time.monotonic()
                struck = self._struck_at(at)
                outcome.error = f"{type(error).__name__}: {error}"
                if not struck:
                    outcome.problems.append(f"the place was never reached, and yet: {outcome.error}")
                    return
                outcome.seconds = now - struck
                if not isinstance(error, objcomm.PeerError):
                    outcome.problems.append(f"not a PeerError, but {outcome.error}")
                if error.rank != rank or error.peer is None:
                    outcome.problems.append(f"it does not say on which rank and of which peer: {outcome.error}")
                break
        else:
            outcome.problems.append("no error came")
            return
        if outcome.seconds > BOUND_SECONDS:
            outcome.problems.append(f"it took {outcome.seconds:.1f} s")
        self._try_again(fault.victim, outcome)

    def _try_again(self, victim: int, outcome: Outcome) -> None:
        """Nobody waits for a rank that is known to be dead."""
        calls: list[Callable[[], object]] = [
            lambda: objcomm.recv_object(victim, timeout=CALL_SECONDS),
            lambda: objcomm.send_object(b"x" * 100_000, victim, timeout=CALL_SECONDS),
        ]
        for call in calls:
            began = time.monotonic()
            try:
                call()
                outcome.problems.append("a call after the error came back")
            except objcomm.PeerError:
                if time.monotonic() - began > BOUND_SECONDS:
                    outcome.problems.append(f"a call after the error took {time.monotonic() - began:.1f} s")


def held(*, at_once: bool = False) -> dict[str, int]:
    """What this process holds once its groups are gone: the least that is seen until its last transfers time out."""
    end = time.monotonic() + (0 if at_once else CALL_SECONDS + 1)
    least: dict[str, int] = {}
    while True:
        gc.collect()
        # What the C library keeps for later is no leak.
        ctypes.CDLL(None).malloc_trim(0)
        now = _held()
        least = {name: min(count, least.get(name, count)) for name, count in now.items()}
        if now["threads"] == 0:
            end = min(end, time.monotonic() + SWEEP_SECONDS)
        if time.monotonic() > end:
            return least
        time.sleep(0.05)


def _held() -> dict[str, int]:
    of_pairs = ("objcomm-sends", "objcomm-receives", "objcomm-local", "objcomm-open", "objcomm-watched")
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(descriptors()),
        "sockets": len(sockets()),
        "threads": sum(thread.name.startswith(of_pairs) for thread in threading.enumerate()),
        "children": len(children),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }
