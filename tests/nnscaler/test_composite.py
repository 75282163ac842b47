"""Several submodules of one model, parallelized one by one: the model is the one that it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from . import code
from .composite_cases import Composed
from .pool import Pool

TWO = Composed()
MIXED = Composed("Mixed", ("Block", "Other"))
TIED = Composed("Tied")


@pytest.mark.parametrize(
    ("case", "world", "parts"),
    [
        (TWO, 2, ["first", "second"]),
        (replace(TWO, optimizer="SGD"), 2, ["first", "second"]),
        (replace(TWO, policy="Replicated"), 2, ["first", "second"]),
        (replace(TWO, plan=1), 2, ["first", "second"]),
        (replace(TWO, plan=1, config={"use_zero": True}), 2, ["first", "second"]),
        (TWO, 4, ["first", "second"]),
        (replace(TWO, marked=("second",)), 2, ["second"]),
        (MIXED, 2, ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]),
        (TIED, 2, ["first", "middle"]),
        (replace(TIED, plan=1), 2, ["first", "middle"]),
    ],
    ids=str,
)
def test_it_trains_as_the_model_in_one_process(
    pool: Pool, tmp_path: Path, case: Composed, world: int, parts: list[str]
) -> None:
    for rank, found in enumerate(pool.run("tests.nnscaler.composite_jobs:run", world, case, str(tmp_path))):
        assert list(found) == parts
        for place, text in found.items():
            assert f"/{tmp_path.name}/{place.replace('.', '/')}/gencode{rank}.py" in text
        assert len(set(found.values())) == len(parts)


def test_sharded_parameters_have_the_weights_of_this_run(pool: Pool, version: str, tmp_path: Path) -> None:
    case = replace(TWO, plan=1, config={"use_zero": 3 if version == "0.9" else True})
    pool.run("tests.nnscaler.composite_jobs:run", 2, case, str(tmp_path))
    pool.close()
    pool.run("tests.nnscaler.composite_jobs:run", 2, replace(case, seed=3), str(tmp_path))
    pool.run("tests.nnscaler.composite_jobs:copies", 2, replace(case, seed=3), str(tmp_path))


def test_objects_move_inside_the_parts(pool: Pool, tmp_path: Path) -> None:
    for source in pool.run("tests.nnscaler.composite_jobs:objects", 2, str(tmp_path)):
        assert code.transfers(source)
        assert "nnscaler_integration" not in code.imports(source)


def test_what_is_frozen_stays(pool: Pool, tmp_path: Path) -> None:
    assert min(pool.run("tests.nnscaler.composite_jobs:frozen", 2, str(tmp_path))) > 4


def test_random_numbers_are_drawn_alike_afterwards(pool: Pool, tmp_path: Path) -> None:
    found = pool.run("tests.nnscaler.composite_jobs:draws_alike", 2, Composed("Random", ("Dropping",)), str(tmp_path))
    assert found[0] == found[1]
    assert found[0][1] == 0.0


@pytest.mark.parametrize(
    "case",
    [TWO, replace(TWO, plan=1), replace(TWO, plan=1, config={"use_zero": True}), TIED, MIXED],
    ids=str,
)
def test_it_can_be_copied_and_pickled(pool: Pool, tmp_path: Path, case: Composed) -> None:
    for done in pool.run("tests.nnscaler.composite_jobs:copies", 2, case, str(tmp_path)):
        assert done == ["deepcopy", "pickle", "cloudpickle", "torch.save"]


def test_classes_pickle_whatever_they_are_called(pool: Pool, tmp_path: Path) -> None:
    for names in pool.run("tests.nnscaler.composite_jobs:classes", 2, str(tmp_path)):
        assert [name.split()[0] for name in names] == ["Block", "Local", "Block", "Block", "Block"]
        assert all(name.split()[1].startswith("GenModel_") for name in names)


@pytest.mark.parametrize("case", [TWO, TIED, replace(TIED, plan=1), MIXED], ids=str)
def test_states_are_saved_merged_and_loaded(pool: Pool, tmp_path: Path, case: Composed) -> None:
    pool.run("tests.nnscaler.composite_states:save", 2, case, str(tmp_path))
    for names in pool.run("tests.nnscaler.composite_states:merge", 2, case, str(tmp_path)):
        assert not any(name.startswith("last.") for name in names)
        assert "head.weight" in names


@pytest.mark.parametrize("case", [TWO, TIED], ids=str)
def test_states_are_saved_once_and_loaded(pool: Pool, tmp_path: Path, case: Composed) -> None:
    pool.run("tests.nnscaler.composite_states:deduped", 2, case, str(tmp_path))


@pytest.mark.parametrize("case", [TWO, replace(TIED, plan=1)], ids=str)
def test_a_saved_model_is_trained_on_in_new_processes(pool: Pool, tmp_path: Path, case: Composed) -> None:
    pool.run("tests.nnscaler.composite_states:save", 2, case, str(tmp_path))
    pool.close()
    assert min(pool.run("tests.nnscaler.composite_states:load_saved", 2, case, str(tmp_path))) > 4


def test_on_another_rank_a_saved_model_is_read_and_not_run(pool: Pool, tmp_path: Path) -> None:
    pool.run("tests.nnscaler.composite_states:save", 2, TWO, str(tmp_path))
    pool.close()
    ((names, said, kind),) = pool.run("tests.nnscaler.composite_states:look_at_saved", 1, str(tmp_path))
    assert "first.up.weight" in names
    assert kind.endswith("first.gencode1")
    assert said.count("rank 1's part of tests.nnscaler.composite_models.Block of 2 does not run here") == 4
