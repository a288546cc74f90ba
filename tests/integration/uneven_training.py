"""Run by torchrun: trains and validates on numbers of rows that two processes cannot share evenly.

Use: python -m tests.integration.uneven_training OUT [--shard]. The first process writes to OUT what
`run` returns for each number of validation rows.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.tree_dataset import RowList, rows_of, step_rows
from apar_core.offline.training.tree_trainer import (
    StepReport,
    TreeCollator,
    TreeTrainer,
    training_arguments,
)
from tests.integration.cpu_sharding import shard_on_cpu
from tests.unit.apar_core.offline.training.random_trees import PAD_ID, packed, random_model

TREES = [
    packed("ab", chain([("abc", ParagraphRecord("bcde")), ("ab", ParagraphRecord("h"))], "d")),
    packed("a", ParagraphRecord("hg")),
    packed("abcdefgh", chain([("a", chain([("b", ParagraphRecord("ccc"))]))])),
]
# Less than the processes, and more than a multiple of them.
NUM_VALIDATION = (1, 3)


def run(num_validation: int) -> dict[str, Any]:
    """Return losses, validation losses and weights of a run with three trees a step."""
    recipe = TrainingRecipe(
        batch_size=3, num_steps=2, learning_rate=1e-2, dtype="float32", log_every_steps=1,
        validate_every_steps=1,
    )  # fmt: skip
    model = copy.deepcopy(random_model(num_key_value_heads=2))
    nn.Module.to(model, torch.float64)  # transformers' own has no types.
    reports: list[StepReport] = []
    with TemporaryDirectory() as folder:
        arguments = training_arguments(recipe, Path(folder), tensorboard=False, save=False)
        trainer = TreeTrainer(
            model,
            arguments,
            recipe,
            collator=TreeCollator.for_model(model, PAD_ID),
            train_rows=step_rows([TREES] * recipe.num_steps, recipe, arguments.world_size),
            validation_rows=RowList(rows_of(TREES[:num_validation], recipe)),
            validate=True,
            on_step=reports.append,
        )
        trainer.train()
        validation = [
            each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each
        ]
        return {
            "losses": [report.loss for report in reports],
            "trees": [report.num_trees for report in reports],
            "validation": validation,
            "weights": trainer.accelerator.get_state_dict(trainer.model_wrapped),
        }


def main() -> None:
    out, *flags = sys.argv[1:]
    if flags:
        shard_on_cpu()
    runs = {num_validation: run(num_validation) for num_validation in NUM_VALIDATION}
    if torch.distributed.get_rank() == 0:
        torch.save(runs, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
