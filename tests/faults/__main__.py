"""``python -m tests.faults``: all faults once more, on each transport, and a table of what became of them."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults import test_both_live, test_endings, test_killed_in_collectives, test_killed_in_p2p
from tests.faults.jobs import TRANSPORTS, Team, report_of

KILLED: dict[str, Callable[[str], list[Team]]] = {
    "a peer killed in a transfer": test_killed_in_p2p.teams,
    "a rank killed in a call among three": test_killed_in_collectives.teams,
}


def main() -> None:
    row = "{:<38}{:>10}{:>8}{:>10}{:>16}"
    print(row.format("faults", "transport", "tried", "as told", "slowest error"))
    for transport in TRANSPORTS:
        for name, teams in KILLED.items():
            seen = report_of(transport, teams).outcomes.values()
            good = sum(not any(outcome.problems for outcome in of_fault) for of_fault in seen)
            slowest = max(outcome.seconds or 0.0 for of_fault in seen for outcome in of_fault)
            print(row.format(name, transport, len(seen), good, f"{slowest:.1f} s"), flush=True)
        both = test_both_live.outcomes(transport).values()
        good = sum(not any(problem for _, problem in of_fault) for of_fault in both)
        slowest = max(seconds for of_fault in both for seconds, _ in of_fault)
        print(row.format("both processes live on", transport, len(both), good, f"{slowest:.1f} s"), flush=True)
        ends = test_endings.endings(transport)
        good = sum(not test_endings.problems(seen, ending) for ending, seen in ends.items())
        slowest = max(seconds or 0.0 for seen in ends.values() for _, _, seconds in seen)
        print(row.format("a process that ends", transport, len(ends), good, f"{slowest:.1f} s"), flush=True)


if __name__ == "__main__":
    main()
