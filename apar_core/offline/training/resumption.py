"""The checkpoint that an interrupted run resumes from, and the check that it is the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.hub import cached_file

from apar_core.errors import TrainingError
from apar_core.offline.data.example_file import example_files
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.tree_trainer import CHECKPOINTS, TreeTrainer

_RECIPE_FILE = "recipe.json"
_INPUTS_FILE = "inputs.json"

_MODEL_FILES = ("config.json", "*.safetensors", "*.bin")

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


Inputs = Mapping[str, str]
"""SHA-256 sums of what a run learns from, by name: model, tokenizer, chat template and data."""


def run_inputs(model_name: str, tokenizer: PreTrainedTokenizerBase, data: Path) -> Inputs:
    """Return the fingerprints of a run's inputs. Files count by name and content, not by place.

    `tokenizer` has its chat template already. Raises DataError if there is no data.
    """
    template = tokenizer.chat_template
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {
        "model": _model_sum(model_name),
        "tokenizer": _sum_of_text(json.dumps([type(tokenizer).__name__, vocabulary])),
        "chat template": _sum_of_text(json.dumps(template, sort_keys=True)),
        "data": _sum_of_files(example_files(data)),
    }


def last_checkpoint(
    out: Path, recipe: TrainingRecipe, inputs: Inputs, *, resume: bool
) -> str | None:
    """Return the newest whole checkpoint of an interrupted run, if it shall go on.

    Raises TrainingError if there is none, if it was made by another recipe or from other inputs, or
    if a new run would mix with an old one's checkpoints or write over a model.
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
    _refuse_other_inputs(folder / _INPUTS_FILE, inputs)
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2])))


def train_from(checkpoint: str | None, trainer: TreeTrainer, out: Path, inputs: Inputs) -> None:
    """Train on from the checkpoint, or from the start; keep recipe and inputs beside them."""
    if trainer.is_world_process_zero():
        record_run(out, trainer.recipe, inputs)
    trainer.train(resume_from_checkpoint=checkpoint)


def record_run(out: Path, recipe: TrainingRecipe, inputs: Inputs) -> None:
    """Write what `last_checkpoint` compares a resumed run with."""
    folder = out / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECIPE_FILE).write_text(recipe.model_dump_json(indent=2) + "\n")
    (folder / _INPUTS_FILE).write_text(json.dumps(dict(inputs), indent=2) + "\n")


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


def _refuse_other_inputs(recorded: Path, inputs: Inputs) -> None:
    if not recorded.is_file():
        return
    before: dict[str, str] = json.loads(recorded.read_text())
    changes = [
        f"the {name} is another (SHA-256 was {before[name][:12]}, is {inputs[name][:12]})"
        for name in inputs
        if name in before and before[name] != inputs[name]
    ]
    if changes:
        raise TrainingError(
            f"the run in {recorded.parent} cannot go on with other inputs: {', '.join(changes)}"
        )


def _model_sum(model_name: str) -> str:
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        # A hub name: its files lie in a folder of the cache that is named by their commit.
        return _sum_of_text(Path(str(cached_file(model_name, "config.json"))).parent.name)
    files = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    return _sum_of_files(sorted(files, key=lambda path: path.name))


def _sum_of_files(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return total.hexdigest()


def _sum_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
