"""Training of prompt tokens by distillation from the frozen model that they belong to.

Source: PPD (arXiv 2405.18628), section 3.3.
Dimensions: B rows, N insertion points of a row, M prompt tokens, E members of an ensemble, V
vocabulary, K predictions with a teacher.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from apar_core.errors import TrainingError
from apar_core.offline.speculation.frozen_training import FrozenTrainer, Trained
from apar_core.offline.speculation.prompt_forward import (
    Insertions,
    PromptCollator,
    insertions,
    prompt_predictions,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens, save_prompt_tokens
from apar_core.offline.training.recipe import PromptRecipe, TinySettings
from apar_core.offline.training.tree_trainer import Batch

# Of the authors' code.
_SECOND_STAGE_RATE = 0.1


def distillation_loss(
    student_KV: Tensor, teacher_KV: Tensor, kind: Literal["forward_kl", "reverse_kl"]
) -> Tensor:
    """Return the divergence [K] of each prediction from its teacher's distribution."""
    student_KV, teacher_KV = student_KV.log_softmax(-1), teacher_KV.log_softmax(-1)
    if kind == "reverse_kl":
        student_KV, teacher_KV = teacher_KV, student_KV
    return (teacher_KV.exp() * (teacher_KV - student_KV)).sum(-1)


class PromptTrainer(FrozenTrainer):
    """Trainer whose loss is the mean over the predictions of all inserted prompt tokens."""

    recipe: PromptRecipe
    _validating = False

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

    @property
    def _first_stage(self) -> int:
        """Steps in which the prompt tokens learn alone: 2 of the paper's 12 epochs."""
        return round(self.recipe.num_steps / 6)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LambdaLR:
        """Build the recipe's schedule; a second stage has a tenth of the learning rate."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.recipe.head == "two stages":
            if self.args.world_size > 1:
                raise TrainingError("head: two stages are trained by one process")
            usual, first = scheduler.lr_lambdas[0], self._first_stage
            scheduler.lr_lambdas = [
                lambda step: usual(step) * (1.0 if step < first else _SECOND_STAGE_RATE)
            ] * len(scheduler.lr_lambdas)
        return scheduler

    def count_targets(self, batch: Batch) -> int:
        """Return the number of predictions that prompt tokens learn."""
        return int(self.places(batch).learned_BNM.sum())

    def summed_loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the predictions of all prompt tokens (equation 1)."""
        prompts = self.accelerator.unwrap_model(model)
        assert isinstance(prompts, PromptTokens)
        places = self.places(batch)
        if prompts.head is not None and self.recipe.head == "two stages":
            prompts.head.requires_grad_(self.state.global_step >= self._first_stage)
        student_KV, teacher_KV = prompt_predictions(self.frozen, prompts, model(), batch, places)
        student_KV = student_KV.float()
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
        seed=recipe.seed,
        average=recipe.average,
        mask=recipe.mask,
        exits=recipe.exits,
        prefix=recipe.prefix,
        head=recipe.head != "model",
    )


PROMPT_TOKENS = Trained(
    name="prompt tokens",
    stream="prompts",
    build=initial_prompts,
    collator=lambda trees, _recipe: PromptCollator(trees),
    trainer=PromptTrainer,
    save=save_prompt_tokens,
    recipe=PromptRecipe,
    tiny_settings=TinySettings[PromptRecipe],
)
"""Prompt tokens, for `train_beside`."""
