"""Every way in which an object crosses devices: loss and all gradients equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from .cases import Case, Outcome
from .code import undefined_names
from .pool import JobFailure

Run = Callable[..., list[Outcome]]
Params = dict[str, Any]

TWO: Params = {"cuts": (1,), "devices": ((0,), (1,))}
THREE: Params = {"cuts": (1, 2), "devices": ((0,), (1,), (2,))}
FOUR: Params = {"cuts": (1, 2, 3), "devices": ((0,), (1,), (2,), (3,))}
INTERLEAVED: Params = {
    "cuts": (1, 2, 3),
    "devices": ((0,), (1,), (0,), (1,)),
    "schedule": "1f1b_interleaved",
    "micros": 4,
}
SCHEDULE: Params = {"schedule": "1f1b", "micros": 4}


def staged(model: str, options: Params, arguments: Params | None = None, **fields: Any) -> Case:
    """A case with the policy that cuts in front of linear layers."""
    plan = 1 + max(device for stage in options["devices"] for device in stage)
    fields.setdefault("samples", options.get("micros", 1))
    return Case(model, "Staged", options, arguments or {}, plan=plan, **fields)


CASES = {
    "report": Case("Reported", "reported"),
    "report with registered layers": Case("Registered", "reported"),
    "no schedule": staged("Chain", TWO),
    "no schedule, several steps": staged("Chain", TWO, samples=3, steps=2),
    "1f1b": staged("Chain", TWO | SCHEDULE),
    "1f1b of four stages": staged("Chain", FOUR | SCHEDULE, {"num_layers": 4}),
    "gpipe": staged("Chain", TWO | {"schedule": "gpipe", "micros": 4}),
    "gpipe of three stages, two steps": staged(
        "Pieces", THREE | {"schedule": "gpipe", "micros": 4}, {"num_layers": 3}, steps=2
    ),
    "1f1b_plus": staged("Chain", TWO | {"schedule": "1f1b_plus", "micros": 4}),
    "chimera": staged("Pieces", FOUR | {"schedule": "chimera_direct", "micros": 4, "loaders": (0,)}, {"num_layers": 4}),
    "interleaved 1f1b": staged("Pieces", INTERLEAVED, {"num_layers": 4}),
    "inference": staged("Chain", TWO, infer_only=True),
    "inference schedule": staged("Chain", TWO | {"schedule": "infer_pipe", "micros": 4}, infer_only=True),
    "inference schedule, two devices a stage": staged(
        "Pieces",
        {"cuts": (1,), "devices": ((0, 1), (2, 3)), "schedule": "infer_pipe", "micros": 4},
        infer_only=True,
    ),
    "built-in pp": Case(
        "Chain", "pp", arguments={"num_layers": 4}, samples=4, config={"pas_config": {"pipeline_nmicros": 4}}
    ),
    "built-in hybrid": Case(
        "Chain",
        "hybrid",
        arguments={"num_layers": 4},
        plan=4,
        samples=4,
        config={"pas_config": {"pipeline_nmicros": 4, "pipeline_nstages": 2, "pp_size": 2}},
    ),
    "replicated 1 to 2": staged("Pieces", {"cuts": (1,), "devices": ((0,), (1, 2))}),
    "replicated 1 to 2, 1f1b": staged("Pieces", {"cuts": (1,), "devices": ((0,), (1, 2))} | SCHEDULE),
    "replicated 2 to 1, 1f1b": staged("Pieces", {"cuts": (1,), "devices": ((0, 1), (2,))} | SCHEDULE),
    "replicated 2 to 2": staged("Registered", {"cuts": (1,), "devices": ((0, 1), (2, 3))}),
    "replicated 2 to 2, 1f1b": staged("Pieces", {"cuts": (1,), "devices": ((0, 1), (2, 3))} | SCHEDULE),
    "replicated 1 to 3, 1f1b": staged("Pieces", {"cuts": (1,), "devices": ((0,), (1, 2, 3))} | SCHEDULE),
    "tensor parallel 1 to 2": staged("Pieces", {"cuts": (1,), "devices": ((0,), (1, 2)), "split": True} | SCHEDULE),
    "tensor parallel 2 to 2": staged("Pieces", {"cuts": (1,), "devices": ((0, 1), (2, 3)), "split": True} | SCHEDULE),
    "stages that share a device": staged("Pieces", {"cuts": (1,), "devices": ((0, 1), (1, 2))}),
    "used by a far stage only": staged("Chain", THREE | SCHEDULE, {"num_layers": 3, "use": (2,)}),
    "used by several later stages": staged("Chain", THREE | SCHEDULE, {"num_layers": 3}),
    "used by a near and a far stage": staged("Chain", FOUR | SCHEDULE, {"num_layers": 4, "use": (1, 3)}),
    "used by several later stages, no schedule": staged("Chain", FOUR, {"num_layers": 4, "use": (1, 3)}),
    "inside a stage": staged("Pieces", {"cuts": (1,), "devices": ((0, 1), (2,)), "single": ("make_pieces",)}),
    "inside a stage, 1f1b": staged(
        "Pieces", {"cuts": (1,), "devices": ((0, 1), (2,)), "single": ("make_pieces",)} | SCHEDULE
    ),
    "inside an unstaged graph": Case("Pieces", "Flat", {"single": ("make_pieces",)}),
    "inside an unstaged graph, three devices": Case("Pieces", "Flat", {"single": ("make_pieces",)}, plan=3),
    "several objects and plain values": staged("Several", TWO | SCHEDULE),
    "plain values, no schedule": staged("Several", TWO),
    "keyword argument": staged("Pieces", TWO | SCHEDULE, {"by_name": True}),
    "keyword argument of a torch operator": staged("Scaled", TWO | SCHEDULE),
    "sizes change": staged("Pieces", TWO | SCHEDULE, steps=2),
    "an example value that cannot be pickled": staged("Unpicklable", TWO | SCHEDULE),
    "recompute": staged("Pieces", TWO | SCHEDULE | {"recompute": True}),
    "recompute, inside a stage": staged(
        "Pieces",
        {"cuts": (1,), "devices": ((0, 1), (2,)), "single": ("make_pieces",), "recompute": True} | SCHEDULE,
    ),
    "asynchronous": staged("Pieces", TWO | SCHEDULE, asynchronous=True),
    "asynchronous, no schedule": staged("Pieces", TWO, asynchronous=True),
    "asynchronous, several objects": staged("Several", TWO | SCHEDULE, asynchronous=True),
    "asynchronous, near and far": staged("Chain", FOUR | SCHEDULE, {"num_layers": 4, "use": (1, 3)}, asynchronous=True),
    "asynchronous, interleaved": staged("Pieces", INTERLEAVED, {"num_layers": 4}, asynchronous=True),
    "asynchronous, 1 to 2": staged(
        "Pieces", {"cuts": (1,), "devices": ((0,), (1, 2))} | SCHEDULE, asynchronous="objects"
    ),
    "asynchronous, 2 to 2": staged(
        "Pieces", {"cuts": (1,), "devices": ((0, 1), (2, 3))} | SCHEDULE, asynchronous="objects"
    ),
    "data on the first rank only": staged("Direct", TWO | SCHEDULE | {"loaders": (0,)}),
    "data on the last rank only": staged("Direct", TWO | SCHEDULE | {"loaders": (1,)}),
    "data on the middle rank only": staged("Direct", THREE | SCHEDULE | {"loaders": (1,)}, {"num_layers": 3}),
    "data on one rank, chimera": staged(
        "Direct", FOUR | {"schedule": "chimera_direct", "micros": 4, "loaders": (2,)}, {"num_layers": 4}
    ),
    "data on one rank, no schedule": staged("Direct", TWO | {"loaders": (0,)}),
    "data on one rank, asynchronous": staged("Direct", TWO | SCHEDULE | {"loaders": (0,)}, asynchronous=True),
    "data on one rank of each stage": staged(
        "Direct", {"cuts": (1,), "devices": ((0, 1), (2, 3)), "loaders": (0, 2)} | SCHEDULE
    ),
}


ONLY_09 = {
    "several schedules in one module": replace(
        staged("Pieces", TWO | {"schedule": "1f1b", "micros": (2, 4)}), samples=4
    ),
    "backward in two parts": staged("Pieces", THREE | SCHEDULE, {"num_layers": 3}, config={"use_fbw": True}),
    "backward in two parts, asynchronous": staged(
        "Pieces", THREE | SCHEDULE, {"num_layers": 3}, config={"use_fbw": True, "use_async_comm": True}
    ),
    "asynchronous by its own setting": staged("Pieces", TWO | SCHEDULE, config={"use_async_comm": True}),
}

# nnScaler 0.9 gets the gradients wrong where two stages share a device, without any object.
WRONG_WITHOUT_OBJECTS = {"0.9": {"stages that share a device"}}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(run: Run, version: str, name: str) -> None:
    case = CASES[name]
    if name in WRONG_WITHOUT_OBJECTS.get(version, ()):
        case = replace(case, infer_only=True)
    outcomes = run(case)
    for outcome in outcomes:
        assert undefined_names(outcome.code) == []
    if not case.infer_only:
        assert all(outcome.gradients for outcome in outcomes)


@pytest.mark.parametrize("name", ONLY_09)
def test_what_only_09_has(run: Run, version: str, name: str) -> None:
    if version != "0.9":
        pytest.skip(f"nnScaler {version} has no such setting")
    for outcome in run(ONLY_09[name]):
        assert undefined_names(outcome.code) == []
        assert outcome.gradients


@pytest.mark.parametrize(
    "name", ["no schedule", "1f1b", "sizes change", "asynchronous", "several objects and plain values"]
)
def test_data_parallel(run: Run, name: str) -> None:
    outcomes = run(CASES[name], 4)
    assert "src=2, dst=3" in outcomes[2].code


def test_the_report_without_the_integration(run: Run, version: str) -> None:
    case = replace(CASES["report"], installed=False)
    if version == "0.8":
        with pytest.raises(JobFailure, match=r"name 'getitem_\w+' is not defined"):
            run(case, timeout=20.0)
    else:
        run(case)  # 0.9 moves it by torch's pickled object calls


def test_one_device_feeds_two_without_the_integration(run: Run, version: str) -> None:
    case = replace(CASES["replicated 1 to 2"], installed=False)
    reason = r"made_\w+|make_pieces_\w+' is not defined" if version == "0.8" else "not found in list"
    with pytest.raises(JobFailure, match=reason):
        run(case, timeout=20.0)
