"""The planner, which knows nothing of nnScaler."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from nnscaler_integration.plan import Broadcast, Move, Transfer, Use, plan_steps, plan_transfers


def deliver(holders: set[int], steps: tuple[Move | Broadcast, ...]) -> set[int]:
    """Who has the value after the steps; every sender must have had it before."""
    received: list[int] = []
    for step in steps:
        assert step.src in holders
        received += step.dsts if isinstance(step, Broadcast) else [step.dst]
    assert len(received) == len(set(received)), "a device receives twice"
    assert not holders & set(received), "a device receives what it has"
    return holders | set(received)


def test_nothing_to_do() -> None:
    assert plan_steps([0, 1], [1, 0]) == ()
    assert plan_steps([0], []) == ()
    assert plan_steps([], []) == ()


def test_one_to_one() -> None:
    assert plan_steps([3], [1]) == (Move(3, 1),)


def test_replicas_pair_up() -> None:
    assert plan_steps([0, 1], [2, 3]) == (Move(0, 2), Move(1, 3))


def test_one_producer_feeds_several_at_once() -> None:
    assert plan_steps([0], [1, 2, 3]) == (Broadcast(0, (1, 2, 3)),)


def test_several_producers_share_the_work() -> None:
    assert plan_steps([0, 1], [2, 3, 4, 5]) == (Broadcast(0, (2, 3)), Broadcast(1, (4, 5)))
    assert plan_steps([0, 1], [2, 3, 4]) == (Move(0, 2), Broadcast(1, (3, 4)))


def test_more_producers_than_needed_are_spread() -> None:
    assert plan_steps([0, 1, 2, 3], [4, 5]) == (Move(0, 4), Move(2, 5))


def test_overlapping_devices_get_nothing_twice() -> None:
    assert plan_steps([0, 1], [1, 2]) == (Move(0, 2),)


def test_needed_but_nowhere() -> None:
    with pytest.raises(ValueError, match="no device holds"):
        plan_steps([], [1])


def test_every_small_layout_is_served() -> None:
    devices = range(5)
    subsets = [set(s) for n in range(6) for s in itertools.combinations(devices, n)]
    for holders, needed in itertools.product(subsets[1:], subsets):
        steps = plan_steps(holders, needed)
        assert deliver(holders, steps) == holders | needed
        load = Counter(step.src for step in steps)
        assert max(load.values(), default=1) == 1
        sizes = [len(step.dsts) if isinstance(step, Broadcast) else 1 for step in steps]
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_stages_are_served_one_by_one_from_the_origin() -> None:
    uses = [Use((1,), alone=True), Use((2, 3), alone=True)]
    assert plan_transfers([0], uses) == [
        Transfer(0, (Move(0, 1),)),
        Transfer(1, (Broadcast(0, (2, 3)),)),
    ]


def test_a_device_that_received_the_value_keeps_it() -> None:
    uses = [Use((1,), alone=True), Use((0,), alone=True), Use((1,), alone=True)]
    assert plan_transfers([0], uses) == [Transfer(0, (Move(0, 1),))]


def test_uses_in_one_sequence_are_served_together_at_the_first_that_lacks_it() -> None:
    uses = [Use((0,)), Use((1,)), Use((2,)), Use((0, 1, 2))]
    assert plan_transfers([0], uses) == [Transfer(1, (Broadcast(0, (1, 2)),))]


def test_outputs_after_stages() -> None:
    # Stage 1 gets it for itself; the outputs of the graph need it everywhere, at the end.
    uses = [Use((1,), alone=True), Use((0, 1, 2), alone=True)]
    assert plan_transfers([0], uses) == [Transfer(0, (Move(0, 1),)), Transfer(1, (Move(0, 2),))]


def test_order_of_devices_changes_nothing() -> None:
    assert plan_steps([1, 0], [3, 2]) == plan_steps([0, 1], [2, 3])
