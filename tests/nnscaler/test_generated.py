"""What the generated code looks like, judged by its structure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from .cases import Case, Outcome
from .code import body, imports, transfers
from .pool import JobFailure, Pool
from .test_pipelines import CASES, FOUR, INTERLEAVED, SCHEDULE, THREE, TWO, staged

Run = Callable[..., list[Outcome]]


def test_only_objcomm_is_imported(run: Run) -> None:
    for outcome in run(CASES["1f1b"]):
        assert "objcomm" in imports(outcome.code)
        assert "nnscaler_integration" not in outcome.code


def test_channels_are_the_names_of_the_adapters(run: Run) -> None:
    sent, received = (outcome.code for outcome in run(CASES["1f1b"]))
    for code in (sent, received):
        (line,) = transfers(code)
        name = re.search(r"channel='(\w+)'", line)
        assert name is not None
        assert line.strip() in body(code, name[1])
    assert re.findall(r"channel='\w+'", sent) == re.findall(r"channel='\w+'", received)


def test_objects_for_one_place_travel_in_one_message(run: Run) -> None:
    sent, received = (outcome.code for outcome in run(CASES["several objects and plain values"]))
    (line,) = transfers(sent)
    assert len(re.findall(r"getitem\w*,", line)) == 4
    (line,) = transfers(received)
    assert line.split("=")[0].count(",") == 3


def test_nothing_is_sent_to_who_has_it(run: Run) -> None:
    # Every stage reads the same sample from its own dataloader.
    for outcome in run(staged("Direct", TWO | SCHEDULE)):
        assert transfers(outcome.code) == []
        assert "objcomm" not in outcome.code


def test_nothing_is_sent_between_stages_of_one_device(run: Run, version: str) -> None:
    outcomes = run(CASES["interleaved 1f1b"])
    # Stages 1 and 3 are on one device: one transfer serves both; stage 2 is where the object was made.
    # 0.9 passes it on by identities from stage to stage, whatever their devices.
    calls = 1 if version == "0.8" else 3
    assert [len(transfers(outcome.code)) for outcome in outcomes] == [calls, calls]


def test_replicas_pair_up(run: Run) -> None:
    outcomes = run(CASES["replicated 2 to 2, 1f1b"])
    ends = [re.findall(r"src=(\d), dst=(\d)", line) for outcome in outcomes for line in transfers(outcome.code)]
    assert ends == [[("0", "2")], [("1", "3")], [("0", "2")], [("1", "3")]]


def test_one_producer_broadcasts(run: Run) -> None:
    outcomes = run(CASES["replicated 1 to 3, 1f1b"])
    for outcome in outcomes:
        (line,) = transfers(outcome.code)
        assert "objcomm.broadcast_object(" in line
        assert "src=0, ranks=[0, 1, 2, 3]" in line


def test_a_far_stage_gets_it_without_a_relay_on_08(run: Run, version: str) -> None:
    outcomes = run(CASES["used by a far stage only"])
    moves = [len(transfers(outcome.code)) for outcome in outcomes]
    # 0.9 passes it on by an identity in the stage between.
    assert moves == ([1, 0, 1] if version == "0.8" else [1, 2, 1])


def test_groups_have_a_control_side_where_objects_move(run: Run) -> None:
    for outcome in run(CASES["1f1b"]):
        assert body(outcome.code, "__init__").count("objcomm.init_control()") == 1


def test_moved_objects_are_released_after_their_last_use(run: Run) -> None:
    for outcome in run(CASES["1f1b"]):
        lines = body(outcome.code, "_train_step")
        adapter = re.search(r"channel='(\w+)'", outcome.code)
        assert adapter is not None
        for line in [line for line in lines if f"model.{adapter[1]}(" in line]:
            found = re.search(r"getitem_\d+", line)
            assert found is not None
            uses = [number for number, other in enumerate(lines) if re.search(rf"\b{found[0]}\b", other)]
            assert lines[uses[-1]] == f"del {found[0]}"
            assert len([number for number in uses if lines[number].startswith("del ")]) == 1


def test_asynchronous_sender_computes_before_it_waits(run: Run) -> None:
    sent, received = (outcome.code for outcome in run(CASES["asynchronous"]))
    lines = body(sent, "_train_step")
    starts = [number for number, line in enumerate(lines) if "_work_" in line and "model." in line]
    waits = [number for number, line in enumerate(lines) if line.endswith(".wait()")]
    segments = [number for number, line in enumerate(lines) if "executor.fexecute" in line]
    assert len(starts) == len(waits) == 4
    for start, wait in list(zip(starts, waits, strict=True))[:-1]:
        assert any(start < segment < wait for segment in segments), "nothing is computed during the transfer"
    # Never more than two are in flight, whatever the number of micro-batches.
    assert all(wait < start for wait, start in zip(waits, starts[2:], strict=False))

    lines = body(received, "_train_step")
    for number, line in enumerate(lines):
        waited = re.fullmatch(r"(\w+) = (\w+)\.wait\(\)", line)
        if waited:
            rest = [other for other in lines[number + 1 :] if re.search(rf"\b{waited[1]}\b", other)]
            assert "executor.fexecute" in rest[0], "waited for before its first use"
            assert lines[number + 1] == f"del {waited[2]}"


@pytest.mark.parametrize(
    "case",
    [
        staged("Pieces", TWO | {"schedule": "1f1b"}),
        staged("Pieces", TWO | {"schedule": "1f1b"}, asynchronous=True),
        staged("Pieces", THREE | {"schedule": "1f1b"}, {"num_layers": 3}),
    ],
    ids=["two stages", "asynchronous", "three stages"],
)
def test_memory_does_not_grow_with_the_micro_batches(pool: Pool, version: str, case: Case) -> None:
    few, many = (
        pool.run("tests.nnscaler.jobs:objects_alive", case.plan, case, f"alive{micros}{id(case)}", micros)
        for micros in (4, 12)
    )
    # A stage holds at most one object for each later stage and one more, as it does with activations. A receive that a
    # thread moves on in the background may bring the next one early, or not.
    assert max(few + many) <= case.plan + bool(case.asynchronous)
    assert case.asynchronous or few == many


def test_outputs_are_refused_unless_allowed(run: Run, version: str) -> None:
    case = staged("Returning", TWO | SCHEDULE)
    if version == "0.8":
        with pytest.raises(JobFailure, match="not commutable between gpus"):
            run(case)
    else:
        run(case)  # 0.9 has no such refusal


@pytest.mark.parametrize("model", ["Returning", "ReturningMade"])
@pytest.mark.parametrize(
    "options",
    [
        THREE | SCHEDULE,
        {"cuts": (1, 2), "devices": ((0, 1), (2,), (3,))} | SCHEDULE,
        THREE,
        INTERLEAVED,
        FOUR | {"schedule": "gpipe", "micros": 4},
    ],
    ids=["1f1b", "two devices", "no schedule", "interleaved", "gpipe"],
)
def test_outputs(run: Run, model: str, options: dict[str, Any]) -> None:
    layers = len(options["devices"])
    for outcome in run(staged(model, options, {"num_layers": layers}, object_outputs=True)):
        assert outcome.outputs is not None  # compared with those of one process, on every rank


@pytest.mark.parametrize("options", [TWO, TWO | SCHEDULE], ids=["no schedule", "1f1b"])
def test_outputs_that_one_dataloader_gave(run: Run, options: dict[str, Any]) -> None:
    run(staged("ReturningData", options | {"loaders": (0,)}, object_outputs=True))


def test_a_module_that_is_called(pool: Pool, version: str) -> None:
    # Not end to end: the generated module has a forward, and autograd runs through it.
    case = Case("Pieces", "Flat", {"single": ("make_pieces",)}, config={"use_end2end": False})
    assert pool.run("tests.nnscaler.jobs:call_module", 2, case, "called") == [2, 2]


def test_a_broadcast_is_shifted_with_its_replica(pool: Pool, version: str) -> None:
    case = staged("Pieces", {"cuts": (1,), "devices": ((0,), (1, 2))} | SCHEDULE)
    (code,) = pool.run("tests.nnscaler.state_jobs:code_of", 1, case, 6)
    found = re.findall(r"= objcomm.broadcast_object\(.*(src=\d, ranks=\[[\d, ]+\])", code)
    assert found == ["src=0, ranks=[0, 1, 2]"] * 3 + ["src=3, ranks=[3, 4, 5]"] * 3


def test_the_estimate_of_the_volume_pickles_nothing(pool: Pool, version: str) -> None:
    assert pool.run("tests.nnscaler.state_jobs:volumes", 1) == [[12 + 2, 2 * (12 + 2), 1]]


def test_a_gradient_is_never_lost_silently(pool: Pool, version: str) -> None:
    case = staged("Hidden", TWO)
    sender, receiver = pool.run("tests.nnscaler.jobs:gradient_lost", 2, case, "hidden")
    # In inference it travels: see gradient_lost. In training both ranks are told.
    assert sender[0] == "EncodeError"
    assert "channel" in sender[1] and "adapter" in sender[1]
    assert ".value" in sender[1]
    assert receiver[0] == "PeerError"


# An object with a tensor that has a history is made in the first stage and used in all others.
HIDDEN = {
    "1f1b": staged("Hidden", TWO | SCHEDULE),
    "gpipe": staged("Hidden", TWO | {"schedule": "gpipe", "micros": 4}),
    "replicated 1 to 2": staged("Hidden", {"cuts": (1,), "devices": ((0,), (1, 2))} | SCHEDULE),
    "replicated 2 to 2": staged("Hidden", {"cuts": (1,), "devices": ((0, 1), (2, 3))}),
    "interleaved": staged("Hidden", INTERLEAVED, {"num_layers": 4}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_gradient_is_refused_in_every_schedule(pool: Pool, version: str, name: str) -> None:
    case = HIDDEN[name]
    raised = pool.run("tests.nnscaler.jobs:trained", case.plan, case, f"refused-{name}".replace(" ", "-"))
    assert raised[0][0] == "EncodeError" and "would be lost" in raised[0][1], raised
    assert {error for error, _ in raised} <= {"EncodeError", "PeerError"}, raised
    assert any(error == "PeerError" for error, _ in raised), raised


def test_a_gradient_between_stages_of_one_device_is_an_error_of_torch(pool: Pool, version: str) -> None:
    """On 0.8 nothing is sent; 0.9 passes the object on through the stage between, on the other device."""
    case = staged("Far", {"cuts": (1, 2), "devices": ((0,), (1,), (0,))})
    raised = pool.run("tests.nnscaler.jobs:trained", case.plan, case, "refused-one-device")
    if version == "0.8":
        assert raised[0][0] == "RuntimeError" and "backward through the graph a second time" in raised[0][1], raised
    else:
        assert [error for error, _ in raised] == ["EncodeError", "PeerError"], raised
