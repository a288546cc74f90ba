"""Trains Medusa heads for an APAR model from the examples that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from apar_core.decoders.medusa_heads import save_medusa_heads
from apar_core.errors import TrainingError
from apar_core.training.example_encoder import EncodingCounts, ExampleEncoder
from apar_core.training.fine_tune import read_groups
from apar_core.training.medusa_targets import MedusaCollator
from apar_core.training.medusa_trainer import MedusaTrainer, initial_heads
from apar_core.training.pretrained import (
    check_model,
    load_model,
    load_tokenizer,
    pad_token_id,
)
from apar_core.training.recipe import MedusaRecipe
from apar_core.training.reports import OnStep
from apar_core.training.resumption import last_checkpoint, train_from
from apar_core.training.tree_dataset import RowList, drawn_rows
from apar_core.training.tree_trainer import TreeCollator, training_arguments


@dataclass(frozen=True, slots=True)
class MedusaResult:
    """What a run did: `accuracy` is each head's share of right proposals on validation."""

    counts: EncodingCounts
    validation_loss: float | None
    accuracy: tuple[float, ...]


def train_medusa(
    model_name: str,
    data: Path,
    out: Path,
    recipe: MedusaRecipe,
    *,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> MedusaResult:
    """Train heads on the frozen model and write them to `out`, as vLLM and our decoder load them.

    Raises TrainingError or DataError if something is not as it must be.
    """
    last = last_checkpoint(out, recipe, resume=resume)
    tokenizer = load_tokenizer(model_name)
    check_model(model_name, recipe.context_length)
    model = load_model(model_name, torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32)
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    training, validation = read_groups(data, encoder).split(recipe.validation_share, recipe.seed)
    validation_rows = RowList(validation.all_rows)
    heads = initial_heads(model, num_heads=recipe.num_heads, num_layers=recipe.num_layers)
    trainer = MedusaTrainer(
        heads,
        model,
        training_arguments(
            recipe, out, validate=bool(len(validation_rows)), tensorboard=True, save=True
        ),
        recipe,
        collator=MedusaCollator(
            TreeCollator.for_model(model, pad_token_id(tokenizer)), recipe.num_heads
        ),
        train_trees=drawn_rows(training, recipe),
        validation_trees=validation_rows,
        on_step=on_step,
    )
    if trainer.is_fsdp_enabled:
        raise TrainingError("heads are too small to shard: train them without FSDP")
    train_from(last, trainer, out)
    loss = trainer.final_validation_loss() if len(validation_rows) else None
    accuracy = trainer.accuracy() if len(validation_rows) else []
    if trainer.is_world_process_zero():
        save_medusa_heads(heads.bfloat16(), out)
    return MedusaResult(encoder.counts, loss, tuple(accuracy))
