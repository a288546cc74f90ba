"""Training of what proposes tokens beside a frozen model: Medusa heads or prompt tokens.

`train_beside` trains on data and can be resumed, `train_tiny_beside` on the corpus of the embedded
model. Both take a `Trained`, which says what is trained and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apar_core.errors import TrainingError
from apar_core.offline.data.tiny_corpus.generator import BROAD_WEIGHTS, Corpus
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.measure_acceptance import prompts_of
from apar_core.offline.training.example_encoder import (
    EncodingCounts,
    PlainEncoder,
    encoder_for,
)
from apar_core.offline.training.fine_tune import (
    Padding,
    last_checkpoint,
    plan_rows,
    read_groups,
    run_inputs,
    train_from,
)
from apar_core.offline.training.packing import PackedTree
from apar_core.offline.training.pretrained import (
    check_model,
    is_sharded,
    load_model,
    load_tokenizer,
    pad_token_id,
    recipe_dtype,
)
from apar_core.offline.training.recipe import FrozenModelRecipe, TinySettings, load_recipe
from apar_core.offline.training.train_tiny import CorpusTrees
from apar_core.offline.training.tree_dataset import TreeGroups
from apar_core.offline.training.tree_trainer import (
    Batch,
    OnStep,
    TreeCollator,
    TreeTrainer,
    training_arguments,
)

ModuleT = TypeVar("ModuleT", bound=Module)
RecipeT = TypeVar("RecipeT", bound=FrozenModelRecipe)

Measure = Callable[
    [PreTrainedModel, PreTrainedTokenizerBase, Any, Sequence[Sequence[int]], Path, int],
    AcceptanceTable,
]
"""Measures the acceptance of a trained module on prompts, and writes the table to a folder.

The last argument limits the text tokens of each answer."""


class FrozenTrainer(TreeTrainer):
    """Trainer of a module that reads a frozen model."""

    def __init__(self, module: Module, frozen: PreTrainedModel, *args: Any, **kw: Any) -> None:
        super().__init__(module, *args, **kw)
        self.frozen = frozen.eval().requires_grad_(False).to(self.args.device)


@dataclass(frozen=True)
class Trained(Generic[ModuleT, RecipeT]):
    """Module trained beside a frozen model: `build` makes the first weights, `save` writes them.

    `name` names the weights in messages, and `stream` the sample of the embedded model's corpus.
    """

    name: str
    stream: str
    build: Callable[[PreTrainedModel, RecipeT], ModuleT]
    collator: Callable[[TreeCollator, RecipeT], Callable[[Sequence[PackedTree]], Batch]]
    trainer: type[FrozenTrainer]
    save: Callable[[ModuleT, Path], None]
    recipe: type[RecipeT]
    tiny_settings: type[TinySettings[RecipeT]]

    def tiny_recipe(self, name_or_file: str | None = None) -> TinySettings[RecipeT]:
        """Load a recipe for the embedded model, by default that of the shipped weights."""
        return load_recipe(name_or_file or f"apar-tiny-{self.stream}", self.tiny_settings)


@dataclass(frozen=True, slots=True)
class FrozenResult:
    """Outcome of a run; loss and acceptance table are None without validation."""

    counts: EncodingCounts
    padding: Padding
    validation_loss: float | None
    table: AcceptanceTable | None


def train_beside(
    trained: Trained[ModuleT, RecipeT],
    model_name: str,
    data: Path,
    out: Path,
    recipe: RecipeT,
    *,
    measure: Measure,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> FrozenResult:
    """Train beside a model; write the weights and their acceptance table to `out`.

    The table is measured on validation prompts; without a validation share there is none. Raises
    TrainingError or DataError for invalid inputs.
    """
    tokenizer = load_tokenizer(model_name)
    inputs = run_inputs(model_name, tokenizer, data)
    last = last_checkpoint(out, recipe, inputs, resume=resume)
    check_model(model_name, recipe.context_length)
    if is_sharded():
        raise TrainingError(f"{trained.name} cannot be sharded: train without FSDP")
    arguments = training_arguments(recipe, out, tensorboard=True, save=True)
    model = load_model(model_name, recipe_dtype(recipe), arguments.device)
    encoder = encoder_for(tokenizer, recipe.context_length)
    groups, drawn = read_groups(data, encoder), recipe
    if isinstance(encoder, PlainEncoder):
        # All answers are one thread, so there is nothing to balance.
        groups = TreeGroups((), groups.all_rows)
        drawn = recipe.model_copy(update={"structured_share": 0.0})
    training, validation = groups.split(recipe.validation_share, recipe.seed)
    collator = TreeCollator.for_model(model, pad_token_id(tokenizer))
    plan = plan_rows(training, validation, drawn, arguments.world_size, collator.multiple)
    module = trained.build(model, recipe)
    trainer = trained.trainer(
        module,
        model,
        arguments,
        recipe,
        collator=trained.collator(collator, recipe),
        train_rows=plan.training,
        validation_rows=plan.validation,
        validate=bool(validation.all_rows),
        on_step=on_step,
    )
    train_from(last, trainer, out, inputs)
    loss = trainer.final_validation_loss() if validation.all_rows else None
    table = None
    if trainer.is_world_process_zero():
        trained.save(module, out)
        if validation.all_rows:
            chosen = prompts_of(validation.all_rows, recipe.num_measured, recipe.seed)
            table = measure(model, tokenizer, module, chosen, out, recipe.measured_tokens)
    return FrozenResult(encoder.counts, plan.padding, loss, table)


def train_tiny_beside(
    trained: Trained[ModuleT, RecipeT],
    checkpoint: Path,
    out: Path,
    settings: TinySettings[RecipeT],
    *,
    measure: Measure,
    on_step: OnStep | None = None,
) -> AcceptanceTable:
    """Train beside a checkpoint of apar-tiny's family on a CPU; write the same to `out`."""
    recipe = settings.recipe
    tokenizer = load_tokenizer(str(checkpoint))
    model = load_model(str(checkpoint), torch.float32, torch.device("cpu"))
    encoder = encoder_for(tokenizer, recipe.context_length)
    module = trained.build(model, recipe)
    with TemporaryDirectory() as folder:
        arguments = training_arguments(
            recipe, Path(folder), tensorboard=False, save=False, use_cpu=True
        )
        trained.trainer(
            module,
            model,
            arguments,
            recipe,
            collator=trained.collator(
                TreeCollator.for_model(model, pad_token_id(tokenizer)), recipe
            ),
            train_rows=CorpusTrees(
                BROAD_WEIGHTS, trained.stream, recipe.seed, recipe, encoder, arguments.world_size
            ),
            on_step=on_step,
        ).train()
    trained.save(module, out)
    examples = Corpus(recipe.seed, held_out=True).examples(settings.num_held_out)
    held_out = encoder.encode_all(examples)
    chosen = prompts_of(held_out, len(held_out), recipe.seed)
    return measure(model, tokenizer, module, chosen, out, recipe.measured_tokens)
