"""Trains Medusa heads for the embedded model on its corpus, on a CPU."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import BaseModel, ConfigDict, Field

from apar_core.offline.data.tiny_corpus.generator import BROAD_WEIGHTS, Corpus
from apar_core.offline.speculation.medusa_heads import save_medusa_heads
from apar_core.offline.speculation.medusa_targets import MedusaCollator
from apar_core.offline.speculation.medusa_trainer import MedusaTrainer, initial_heads
from apar_core.offline.training.example_encoder import ExampleEncoder
from apar_core.offline.training.pretrained import load_model, load_tokenizer, pad_token_id
from apar_core.offline.training.recipe import MedusaRecipe, load_recipe
from apar_core.offline.training.reports import OnStep
from apar_core.offline.training.train_tiny import CorpusTrees
from apar_core.offline.training.tree_dataset import RowList
from apar_core.offline.training.tree_trainer import TreeCollator, training_arguments


class TinyMedusaSettings(BaseModel):
    """Heads of the embedded model: one run over the corpus's broad mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: MedusaRecipe = Field(description="The run; its seed names split and draws.")
    num_held_out: int = Field(200, ge=1, description="Held-out examples to check the heads on.")


def tiny_medusa_recipe(name_or_file: str = "apar-tiny-medusa") -> TinyMedusaSettings:
    """Return the shipped recipe of the embedded model's heads, or the one in a file."""
    return load_recipe(name_or_file, TinyMedusaSettings)


def train_tiny_medusa(
    checkpoint: Path, out: Path, settings: TinyMedusaSettings, on_step: OnStep | None = None
) -> list[float]:
    """Train heads for the checkpoint, write them to `out`; return their held-out accuracy."""
    recipe = settings.recipe
    tokenizer = load_tokenizer(str(checkpoint))
    model = load_model(str(checkpoint), torch.float32, torch.device("cpu"))
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    held_out = Corpus(recipe.seed, held_out=True).examples(settings.num_held_out)
    heads = initial_heads(model, num_heads=recipe.num_heads, num_layers=recipe.num_layers)
    with TemporaryDirectory() as folder:
        arguments = training_arguments(
            recipe, Path(folder), tensorboard=False, save=False, use_cpu=True
        )
        trainer = MedusaTrainer(
            heads,
            model,
            arguments,
            recipe,
            collator=MedusaCollator(
                TreeCollator.for_model(model, pad_token_id(tokenizer)), recipe.num_heads
            ),
            train_rows=CorpusTrees(
                BROAD_WEIGHTS, "medusa", recipe.seed, recipe, encoder, arguments.world_size
            ),
            validation_rows=RowList([[row] for row in encoder.encode_all(held_out)]),
            on_step=on_step,
        )
        trainer.train()
        accuracy = trainer.accuracy()
    save_medusa_heads(heads.bfloat16(), out)
    return accuracy
