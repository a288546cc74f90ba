"""Checkpoints that a run resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from apar_core.errors import TrainingError
from apar_core.offline.training.fine_tune import last_checkpoint, record_run
from apar_core.offline.training.recipe import LoraSettings, TrainingRecipe

RECIPE = TrainingRecipe(batch_size=4, num_steps=10, learning_rate=1e-3)
INPUTS = {"model": "a" * 64, "tokenizer": "b" * 64, "chat template": "c" * 64, "data": "d" * 64}


def checkpoint(out: Path, step: int, state: str | None = "{}") -> Path:
    folder = out / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    return folder


def test_the_newest_complete_checkpoint_is_used(tmp_path: Path) -> None:
    checkpoint(tmp_path, 8)
    newest = checkpoint(tmp_path, 16)
    # As left by a process that is killed while writing.
    checkpoint(tmp_path, 24, state=None)
    checkpoint(tmp_path, 32, state='{"epoch": 1')

    assert last_checkpoint(tmp_path, RECIPE, INPUTS, resume=True) == str(newest)


def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path) -> None:
    checkpoint(tmp_path, 8, state=None)

    assert last_checkpoint(tmp_path, RECIPE, INPUTS, resume=False) is None
    with pytest.raises(TrainingError, match="nothing to resume"):
        last_checkpoint(tmp_path, RECIPE, INPUTS, resume=True)


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 8)

    with pytest.raises(TrainingError, match="checkpoints of an earlier run"):
        last_checkpoint(tmp_path, RECIPE, INPUTS, resume=False)


def test_a_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

    with pytest.raises(TrainingError, match="already has a model"):
        last_checkpoint(tmp_path, RECIPE, INPUTS, resume=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 20}, "another recipe: num_steps was 10 and is 20"),
        ({"seed": 3, "batch_size": 8}, "batch_size was 4 and is 8, seed was 0 and is 3"),
        ({"lora": LoraSettings()}, "lora was None and is {"),
    ],
)
def test_a_run_resumes_only_with_the_same_recipe(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    checkpoint(tmp_path, 8)
    record_run(tmp_path, RECIPE, INPUTS)

    with pytest.raises(TrainingError, match=message):
        last_checkpoint(tmp_path, RECIPE.model_copy(update=change), INPUTS, resume=True)


def test_settings_that_do_not_affect_learning_may_change(tmp_path: Path) -> None:
    newest = checkpoint(tmp_path, 8)
    record_run(tmp_path, RECIPE, INPUTS)
    changed = RECIPE.model_copy(
        update={"micro_batch_size": 2, "num_loaders": 1, "save_every_steps": 5}
    )

    assert last_checkpoint(tmp_path, changed, INPUTS, resume=True) == str(newest)


@pytest.mark.parametrize("name", list(INPUTS))
def test_a_run_resumes_only_with_the_same_inputs(tmp_path: Path, name: str) -> None:
    newest = checkpoint(tmp_path, 8)
    record_run(tmp_path, RECIPE, INPUTS)

    with pytest.raises(TrainingError, match=f"other inputs: the {name} has changed") as raised:
        last_checkpoint(tmp_path, RECIPE, INPUTS | {name: "e" * 64}, resume=True)

    assert str(raised.value).count("has changed") == 1
    assert last_checkpoint(tmp_path, RECIPE, INPUTS, resume=True) == str(newest)
