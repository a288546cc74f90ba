"""Training of prompt tokens by distillation from the frozen model that they belong to.

Source: PPD (arXiv 2405.18628), section 3.3.
Dimensions: B rows, N insertion points of a row, M prompt tokens, E members of an ensemble, V
vocabulary, K predictions with a teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.offline.data.tiny_corpus.generator import BROAD_WEIGHTS, Corpus
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.measure_acceptance import measure_and_write, prompts_of
from apar_core.offline.speculation.prompt_forward import (
    Insertions,
    PromptCollator,
    insertions,
    prompt_logits,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens, save_prompt_tokens
from apar_core.offline.training.example_encoder import EncodingCounts, ExampleEncoder
from apar_core.offline.training.fine_tune import (
    Padding,
    last_checkpoint,
    plan_rows,
    read_groups,
    run_inputs,
    train_from,
)
from apar_core.offline.training.pretrained import (
    check_model,
    is_sharded,
    load_model,
    load_tokenizer,
    pad_token_id,
    recipe_dtype,
)
from apar_core.offline.training.recipe import PromptRecipe, load_recipe
from apar_core.offline.training.train_tiny import CorpusTrees
from apar_core.offline.training.tree_trainer import (
    Batch,
    OnStep,
    TreeCollator,
    TreeTrainer,
    training_arguments,
)


def distillation_loss(
    student_KV: Tensor, teacher_KV: Tensor, kind: Literal["forward_kl", "reverse_kl"]
) -> Tensor:
    """Return the divergence [K] of each prediction from its teacher's distribution."""
    student_KV, teacher_KV = student_KV.log_softmax(-1), teacher_KV.log_softmax(-1)
    if kind == "reverse_kl":
        student_KV, teacher_KV = teacher_KV, student_KV
    return (teacher_KV.exp() * (teacher_KV - student_KV)).sum(-1)


class PromptTrainer(TreeTrainer):
    """Trainer whose loss is the mean over the predictions of all inserted prompt tokens."""

    recipe: PromptRecipe

    def __init__(
        self, prompts: PromptTokens, frozen: PreTrainedModel, *args: Any, **kw: Any
    ) -> None:
        super().__init__(prompts, *args, **kw)
        self.frozen = frozen.eval().requires_grad_(False).to(self.args.device)
        self._validating = False

    def evaluate(self, *args: Any, **kw: Any) -> dict[str, float]:
        """Return the mean loss over the validation trees, with the same insertions each time."""
        self._validating = True
        try:
            return super().evaluate(*args, **kw)
        finally:
            self._validating = False

    def places(self, batch: Batch) -> Insertions:
        """Draw the insertion points of a batch.

        The draw depends on seed, step and batch only, so a resumed run makes the same one.
        """
        step = 0 if self._validating else self.state.global_step + 1
        seed = hash((self.recipe.seed, step, int(batch["token_ids_BT"].sum())))
        generator = torch.Generator().manual_seed(seed % 2**63)
        return insertions(batch, self.recipe.num_prompts, self.recipe.insertion_share, generator)

    def count_targets(self, batch: Batch) -> int:
        """Return the number of predictions that prompt tokens learn."""
        return int(self.places(batch).learned_BNM.sum())

    def summed_loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the predictions of all prompt tokens (equation 1)."""
        prompts = self.accelerator.unwrap_model(model)
        assert isinstance(prompts, PromptTokens)
        places = self.places(batch)
        logits_KEV, teacher_KV = prompt_logits(self.frozen, model(), batch, places)
        student_KV = prompts.combined(logits_KEV.float())
        if self.recipe.loss == "labels":
            rows_BNM = torch.arange(len(places.after_BN), device=student_KV.device)[:, None, None]
            labels_BNM = batch["targets_BT"][rows_BNM, places.teacher_BNM]
            loss_K = cross_entropy(student_KV, labels_BNM[places.learned_BNM], reduction="none")
        else:
            loss_K = distillation_loss(student_KV, teacher_KV.float(), self.recipe.loss)
        weights_M = self.recipe.alpha ** torch.arange(
            self.recipe.num_prompts, device=loss_K.device, dtype=torch.float32
        )
        return (loss_K * weights_M.expand(places.learned_BNM.shape)[places.learned_BNM]).sum()


def initial_prompts(model: PreTrainedModel, recipe: PromptRecipe) -> PromptTokens:
    """Return the prompt tokens with which a run of the recipe starts."""
    return PromptTokens.like_text(
        model,
        num_prompts=recipe.num_prompts,
        ensemble=recipe.ensemble,
        average=recipe.average,
        seed=recipe.seed,
    )


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Outcome of a run; loss and acceptance table are None without validation."""

    counts: EncodingCounts
    padding: Padding
    validation_loss: float | None
    table: AcceptanceTable | None


def train_prompts(
    model_name: str,
    data: Path,
    out: Path,
    recipe: PromptRecipe,
    *,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> PromptResult:
    """Train prompt tokens for a model; write them and their acceptance table to `out`.

    The table is measured on the model's greedy answers to validation prompts; without a validation
    share there is none. Raises TrainingError or DataError for invalid inputs.
    """
    tokenizer = load_tokenizer(model_name)
    inputs = run_inputs(model_name, tokenizer, data)
    last = last_checkpoint(out, recipe, inputs, resume=resume)
    check_model(model_name, recipe.context_length)
    if is_sharded():
        raise TrainingError("prompt tokens cannot be sharded: train without FSDP")
    arguments = training_arguments(recipe, out, tensorboard=True, save=True)
    model = load_model(model_name, recipe_dtype(recipe), arguments.device)
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    training, validation = read_groups(data, encoder).split(recipe.validation_share, recipe.seed)
    collator = TreeCollator.for_model(model, pad_token_id(tokenizer))
    plan = plan_rows(training, validation, recipe, arguments.world_size, collator.multiple)
    prompts = initial_prompts(model, recipe)
    trainer = PromptTrainer(
        prompts,
        model,
        arguments,
        recipe,
        collator=PromptCollator(collator),
        train_rows=plan.training,
        validation_rows=plan.validation,
        validate=bool(validation.all_rows),
        on_step=on_step,
    )
    train_from(last, trainer, out, inputs)
    loss = trainer.final_validation_loss() if validation.all_rows else None
    table = None
    if trainer.is_world_process_zero():
        save_prompt_tokens(prompts, out)
        if validation.all_rows:
            chosen = prompts_of(validation.all_rows, recipe.num_measured, recipe.seed)
            table = measure_and_write(model, tokenizer, prompts, chosen, out)
    return PromptResult(encoder.counts, plan.padding, loss, table)


class TinyPromptSettings(BaseModel):
    """Recipe of the embedded model's prompt tokens: one run over the broad mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: PromptRecipe = Field(
        description="Settings of the run; its seed determines split and draws."
    )
    num_held_out: int = Field(200, ge=1, description="Held-out prompts for the acceptance table.")


def tiny_prompt_recipe(name_or_file: str = "apar-tiny-prompts") -> TinyPromptSettings:
    """Load a recipe of the embedded model's prompt tokens by name or file."""
    return load_recipe(name_or_file, TinyPromptSettings)


def train_tiny_prompts(
    checkpoint: Path, out: Path, settings: TinyPromptSettings, on_step: OnStep | None = None
) -> AcceptanceTable:
    """Train prompt tokens for the checkpoint on a CPU and write them to `out` with their table."""
    recipe = settings.recipe
    tokenizer = load_tokenizer(str(checkpoint))
    model = load_model(str(checkpoint), torch.float32, torch.device("cpu"))
    encoder = ExampleEncoder(tokenizer, recipe.context_length)
    prompts = initial_prompts(model, recipe)
    with TemporaryDirectory() as folder:
        arguments = training_arguments(
            recipe, Path(folder), tensorboard=False, save=False, use_cpu=True
        )
        PromptTrainer(
            prompts,
            model,
            arguments,
            recipe,
            collator=PromptCollator(TreeCollator.for_model(model, pad_token_id(tokenizer))),
            train_rows=CorpusTrees(
                BROAD_WEIGHTS, "prompts", recipe.seed, recipe, encoder, arguments.world_size
            ),
            on_step=on_step,
        ).train()
    save_prompt_tokens(prompts, out)
    held_out = encoder.encode_all(
        Corpus(recipe.seed, held_out=True).examples(settings.num_held_out)
    )
    chosen = prompts_of(held_out, len(held_out), recipe.seed)
    return measure_and_write(model, tokenizer, prompts, chosen, out)
