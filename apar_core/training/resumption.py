"""What an interrupted run goes on from, and whether it is still the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from apar_core.errors import TrainingError
from apar_core.training.recipe import TrainingRecipe
from apar_core.training.tree_trainer import CHECKPOINTS, TreeTrainer

_RECIPE_FILE = "recipe.json"

# They change what a run costs and tells, and nothing that it learns.
_FREE_FIELDS = {
    "micro_batch_size",
    "pack_trees",
    "gradient_checkpointing",
    "validate_every_steps",
    "save_every_steps",
    "keep_checkpoints",
    "log_every_steps",
    "num_loaders",
}


def last_checkpoint(out: Path, recipe: TrainingRecipe, *, resume: bool) -> str | None:
    """Return the newest whole checkpoint of an interrupted run, if it shall go on.

    Raises TrainingError if there is none, if it was made by another recipe, or if a new run would
    mix with an old one's checkpoints or write over a model.
    """
    folder = out / CHECKPOINTS
    whole = [path for path in folder.glob("checkpoint-*") if _is_whole(path)]
    if resume and not whole:
        raise TrainingError(f"nothing to resume: {folder} holds no whole checkpoint")
    if not resume and whole:
        raise TrainingError(
            f"{folder} holds checkpoints of an earlier run: resume it, or choose another folder"
        )
    if not resume:
        if (out / "config.json").exists():
            raise TrainingError(f"{out} holds a model already: choose another folder")
        return None
    _refuse_other_recipe(folder / _RECIPE_FILE, recipe)
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2])))


def train_from(checkpoint: str | None, trainer: TreeTrainer, out: Path) -> None:
    """Train on from the checkpoint, or from the start; write the recipe down beside them."""
    if trainer.is_world_process_zero():
        record_recipe(out, trainer.recipe)
    trainer.train(resume_from_checkpoint=checkpoint)


def record_recipe(out: Path, recipe: TrainingRecipe) -> None:
    """Write down what `last_checkpoint` compares a recipe with."""
    folder = out / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECIPE_FILE).write_text(recipe.model_dump_json(indent=2) + "\n")


def _is_whole(checkpoint: Path) -> bool:
    # The Trainer writes its state last: a run that was killed before left a part of a checkpoint.
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return checkpoint.name.rpartition("-")[2].isdecimal()


def _refuse_other_recipe(recorded: Path, recipe: TrainingRecipe) -> None:
    if not recorded.is_file():
        return
    before: dict[str, Any] = json.loads(recorded.read_text())
    now: dict[str, Any] = recipe.model_dump(mode="json")
    changes = [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if name not in _FREE_FIELDS and before.get(name) != now.get(name)
    ]
    if changes:
        raise TrainingError(
            f"the run in {recorded.parent} cannot go on with another recipe: {', '.join(changes)}"
        )
