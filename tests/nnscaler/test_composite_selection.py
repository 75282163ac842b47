"""Which submodules are taken, under which names; what could not be right is refused before anything is done."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nnscaler_integration import mark, selection, tied_places, ties, with_tied
from nnscaler_integration.selection import fingerprint, instance_name, select
from nnscaler_integration.ties import keep_once


class Part(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.factor * self.linear(x)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Part()
        self.two = nn.ModuleList([Part(), nn.ReLU()])
        self.head = nn.Linear(2, 1)


def places(model: nn.Module, marked: selection.Marked = None) -> list[tuple[str, ...]]:
    return [item.places for item in select(model, marked)]


def test_examples() -> None:
    for module in (selection, ties):
        assert doctest.testmod(module).failed == 0


def test_by_mark_by_name_and_by_class() -> None:
    model = Whole()
    mark(model.two[0], pas_policy="tp")
    assert places(model) == [("two.0",)]
    assert select(model)[0].mark.pas_policy == "tp"
    assert places(model, Part) == [("one",), ("two.0",)]
    assert places(model, ["head", "one"]) == [("one",), ("head",)]
    assert places(model, "two.0") == [("two.0",)]
    assert places(model, [nn.Linear, nn.ReLU]) == [("one.linear",), ("two.0.linear",), ("two.1",), ("head",)]


def test_a_module_at_two_places_is_taken_once() -> None:
    model = Whole()
    model.again = model.two[0]
    assert places(model, ["again"]) == [("two.0", "again")]
    assert places(model, Part) == [("one",), ("two.0", "again")]


def _nothing(model: Whole) -> selection.Marked:
    return None


def _unknown(model: Whole) -> selection.Marked:
    return ["one", "three"]


def _root(model: Whole) -> selection.Marked:
    return [Whole]


def _nested(model: Whole) -> selection.Marked:
    return ["one", "one.linear"]


def _nested_elsewhere(model: Whole) -> selection.Marked:
    model.inner = model.one.linear
    return ["one", "inner"]


def _shared_with_the_rest(model: Whole) -> selection.Marked:
    model.rest = nn.Linear(2, 2)
    model.rest.weight = model.one.linear.weight
    return ["one"]


def _shared_with_another(model: Whole) -> selection.Marked:
    part = model.two[0]
    assert isinstance(part, Part)
    part.linear.bias = model.one.linear.bias
    return ["one", "two.0"]


def _shared_memory(model: Whole) -> selection.Marked:
    model.rest = nn.Linear(2, 2)
    model.rest.weight = nn.Parameter(model.one.linear.weight.detach().t())
    return ["one"]


def _part_of_it_is_elsewhere(model: Whole) -> selection.Marked:
    model.inner = model.one.linear
    return ["one"]


def _hooks(model: Whole) -> selection.Marked:
    model.one.register_forward_hook(lambda module, args, output: output + 1)
    return ["one"]


def _numbered(model: Whole) -> selection.Marked:
    return ["two"]


def _in_a_list(model: Whole) -> selection.Marked:
    vars(model)["order"] = [model.one, model.two]
    return ["one"]


def _in_a_dict(model: Whole) -> selection.Marked:
    vars(model.two[1])["back"] = {"up": model.one}
    return ["one"]


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (_nothing, "no submodule of Whole is marked"),
        (_unknown, "Whole has no submodule three"),
        (_root, "the whole model is marked: nnscaler.parallelize is for that"),
        (_nested, "one.linear is part of one, and both are marked: parallelized modules cannot be nested"),
        (_nested_elsewhere, "one.linear is part of one, and both are marked"),
        (_shared_with_the_rest, "one.linear.weight and rest.weight are one parameter"),
        (_shared_with_another, "one.linear.bias and two.0.linear.bias are one parameter"),
        (_shared_memory, "one.linear.weight and rest.weight are one parameter"),
        (_part_of_it_is_elsewhere, "one.linear.weight and inner.weight are one parameter"),
        (_hooks, "one has hooks"),
        (_numbered, "two is a ModuleList, in which nnScaler would make a Python name of '0.linear.weight'"),
        (_in_a_list, "Whole.order refers to one too, but not as a submodule"),
        (_in_a_dict, "two.1.back refers to one too, but not as a submodule"),
    ],
)
def test_what_could_not_be_right_is_refused(prepare: Callable[[Whole], selection.Marked], said: str) -> None:
    model = Whole()
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        select(model, prepare(model))


def test_names_are_unique_and_importable() -> None:
    odd = ["a/b", "a-b", "a b", "a-2f-b", "é", "..", "a_b", "0"]
    names = [instance_name("M", place) for place in odd if place != ".."]
    assert len(set(names)) == len(names)
    assert all("/" not in name and " " not in name for name in names)


def _changed_attribute(part: Part) -> None:
    part.factor = 3.0


def _changed_structure(part: Part) -> None:
    part.linear = nn.Linear(2, 2, bias=False)


def _changed_dtype(part: Part) -> None:
    part.half()


def _changed_grad(part: Part) -> None:
    part.linear.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [_changed_attribute, _changed_structure, _changed_dtype, _changed_grad])
def test_the_fingerprint_tells_what_code_depends_on(change: Callable[[Part], None]) -> None:
    example = {"x": torch.zeros(1, 2)}
    part = Part()
    before = fingerprint(part, example, "tp")
    assert before == fingerprint(Part(), {"x": torch.ones(1, 2)}, "tp")  # values are no matter of the code
    assert before != fingerprint(part, {"x": torch.zeros(2, 2)}, "tp")
    assert before != fingerprint(part, example, "dp")
    change(part)
    assert before != fingerprint(part, example, "tp")


def _alike(version: int) -> type[Part]:
    """Classes of one name that differ in what a function or the class itself says."""
    if version == 0:

        class Alike(Part):
            def forward(self, x: torch.Tensor) -> Any:
                return self.linear(x)

        return Alike
    if version == 1:

        class Alike(Part):  # type: ignore[no-redef]
            def forward(self, x: torch.Tensor) -> Any:
                return self.linear(x) + 1

        return Alike
    if version == 2:

        class Alike(Part):  # type: ignore[no-redef]
            bias = 2.0

            def forward(self, x: torch.Tensor) -> Any:
                return self.linear(x)

        return Alike

    class Alike(Part):  # type: ignore[no-redef]
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> Any:
            return self.linear(x)

    return Alike


def test_the_fingerprint_tells_the_source() -> None:
    found = [fingerprint(_alike(version)(), {}, "tp") for version in range(4)]
    assert len(set(found)) == 4
    assert found == [fingerprint(_alike(version)(), {}, "tp") for version in range(4)]


def test_states_of_tied_modules() -> None:
    model = Whole()
    model.again = model.one
    full = dict(model.state_dict())
    ties = tied_places(model)
    assert ties == {"again": "one"}
    keep_once(model, ties)
    once = model.state_dict()
    assert once.keys() == {name for name in full if not name.startswith("again.")}
    assert with_tied(once, model).keys() == full.keys()
    outer = nn.Sequential(model)
    assert not any("again" in name for name in outer.state_dict())
    for target in (model, outer):
        state = {name: torch.zeros_like(value) for name, value in target.state_dict().items()}
        target.load_state_dict(state)
        assert all(not value.any() for value in target.state_dict().values())
    model.load_state_dict(full)  # as an original names it
