"""Trains Medusa heads for an APAR model from the examples that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from apar_core.errors import TrainingError
from apar_core.offline.speculation.medusa_heads import save_medusa_heads
from apar_core.offline.speculation.medusa_targets import MedusaCollator
from apar_core.offline.speculation.medusa_trainer import MedusaTrainer, initial_heads
from apar_core.offline.training.example_encoder import EncodingCounts, ExampleEncoder
from apar_core.offline.training.fine_tune import Padding, plan_rows, read_groups
from apar_core.offline.training.pretrained import (
    check_model,
    is_sharded,
    load_model,
    load_tokenizer,
    pad_token_id,
    recipe_dtype,
)
from apar_core.offline.training.recipe import MedusaRecipe
from apar_core.offline.training.reports import OnStep
from apar_core.offline.training.resumption import last_checkpoint, run_inputs, train_from
from apar_core.offline.training.tree_trainer import TreeCollator, training_arguments


@dataclass(frozen=True, slots=True)
class MedusaResult:
    """What a run did: `accuracy` is each head's share of right proposals on validation."""

    counts: EncodingCounts
    padding: Padding
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
    tokenizer = load_tokenizer(model_name)
    inputs = run_inputs(model_name, tokenizer, data)
    last = last_checkpoint(out, recipe, inputs, resume=resume)
    check_model(model_name, recipe.context_length)
    if is_sharded():
        raise TrainingError("heads are too small to shard: train them without FSDP")
    arguments = training_arguments(recipe, out, tensorboard=True, save=True)
    model = load_model(model_name, recipe_dtype(recipe), arguments.device)
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    training, validation = read_groups(data, encoder).split(recipe.validation_share, recipe.seed)
    collator = TreeCollator.for_model(model, pad_token_id(tokenizer))
    plan = plan_rows(training, validation, recipe, arguments.world_size, collator.multiple)
    heads = initial_heads(model, num_heads=recipe.num_heads, num_layers=recipe.num_layers)
    trainer = MedusaTrainer(
        heads,
        model,
        arguments,
        recipe,
        collator=MedusaCollator(collator, recipe.num_heads),
        train_rows=plan.training,
        validation_rows=plan.validation,
        validate=bool(validation.all_rows),
        on_step=on_step,
    )
    train_from(last, trainer, out, inputs)
    loss = trainer.final_validation_loss() if validation.all_rows else None
    accuracy = trainer.accuracy() if validation.all_rows else []
    if trainer.is_world_process_zero():
        save_medusa_heads(heads.bfloat16(), out)
    return MedusaResult(encoder.counts, plan.padding, loss, tuple(accuracy))
