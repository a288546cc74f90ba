"""Trainer on packed trees."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from apar_core.offline.data.records import ParagraphRecord, chain
from apar_core.offline.training.packing import IGNORED_TARGET, batch_trees
from apar_core.offline.training.recipe import TrainingRecipe
from apar_core.offline.training.tree_dataset import RowList, rows_of, step_rows
from apar_core.offline.training.tree_trainer import (
    StepReport,
    TreeCollator,
    TreeTrainer,
    training_arguments,
)
from tests.unit.apar_core.offline.training.random_trees import (
    PAD_ID,
    packed,
    random_model,
    tree_loss,
)

ROWS = [
    packed("ab", chain([("abc", ParagraphRecord("bcde")), ("ab", ParagraphRecord("h"))], "d")),
    packed("a", ParagraphRecord("hg")),
    packed("abcdefgh", chain([("a", chain([("b", ParagraphRecord("ccc"))]))])),
    packed("c", ParagraphRecord("abcdabcd")),
]
RECIPE = TrainingRecipe(
    batch_size=4, num_steps=1, learning_rate=1e-2, dtype="float32", log_every_steps=1
)
NUM_TARGETS = sum(target != IGNORED_TARGET for row in ROWS for target in row.targets)


def trainer_of(
    folder: Path, model: LlamaForCausalLM, reports: list[StepReport], **changes: object
) -> TreeTrainer:
    recipe = RECIPE.model_copy(update=changes)
    return TreeTrainer(
        model,
        training_arguments(recipe, folder, tensorboard=False, save=False),
        recipe,
        collator=TreeCollator.for_model(model, PAD_ID),
        train_rows=step_rows([ROWS] * recipe.num_steps, recipe, 1),
        validation_rows=RowList(rows_of(ROWS, recipe)),
        on_step=reports.append,
    )


class Gradients(TrainerCallback):
    """Stores the gradients of the last step."""

    last: list[Tensor]

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """See TrainerCallback."""
        model: nn.Module = kwargs["model"]
        self.last = [p.grad.clone() for p in model.parameters() if p.grad is not None]


def trained(
    folder: Path,
    *,
    weights: torch.dtype = torch.float32,
    gradients: Gradients | None = None,
    **changes: object,
) -> tuple[list[Tensor], list[StepReport]]:
    model = copy.deepcopy(random_model(num_key_value_heads=2))
    nn.Module.to(model, weights)  # transformers' own has no types.
    reports: list[StepReport] = []
    trainer = trainer_of(folder, model, reports, **changes)
    if gradients is not None:
        trainer.add_callback(gradients)
    trainer.train()
    return [parameter.detach() for parameter in model.parameters()], reports


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 2},
        # Two rows of the second pass are empty.
        {"micro_batch_size": 3},
        {"micro_batch_size": 2, "pack_trees": True, "context_length": 24},
    ],
    ids=["one by one", "two by two", "with empty rows", "packed"],
)
def test_micro_batches_train_like_the_whole_batch(tmp_path: Path, changes: dict[str, Any]) -> None:
    # Rows have different numbers of targets, so the mean of the parts' means would differ.
    # Adam's first step divides a gradient by its magnitude, which amplifies rounding errors of
    # gradients near 0 to 1e-4; hence float64. As weights hardly reveal the gradients, those are
    # compared too.
    teaching, in_parts = Gradients(), Gradients()
    whole, whole_reports = trained(
        tmp_path, weights=torch.float64, gradients=teaching, micro_batch_size=4
    )
    parts, reports = trained(tmp_path, weights=torch.float64, gradients=in_parts, **changes)

    assert len(teaching.last) == len(whole)
    for gradient, expected in zip(in_parts.last, teaching.last, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)
    for weights, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
    assert reports[0].loss == pytest.approx(whole_reports[0].loss, abs=1e-5)
    assert reports[0].num_targets == NUM_TARGETS
    assert reports[0].num_trees == len(ROWS)


def test_the_reported_loss_is_the_mean_over_all_targets(tmp_path: Path) -> None:
    model = copy.deepcopy(random_model(num_key_value_heads=2))
    expected = tree_loss(model, batch_trees(ROWS, PAD_ID)).item()

    _, (report,) = trained(tmp_path, micro_batch_size=2)

    assert report.loss == pytest.approx(expected, abs=1e-5)
    assert (report.step, report.num_steps) == (1, 1)
    assert (report.num_targets, report.num_trees) == (NUM_TARGETS, 4)
    assert report.learned_tokens_per_s == pytest.approx(NUM_TARGETS / report.seconds)
    assert report.trees_per_s == pytest.approx(4 / report.seconds)
    assert report.learning_rate > 0
    # Micro-batches of two rows, each as long as the longer one.
    lengths = [len(row.token_ids) for row in ROWS]
    num_processed = 2 * (max(lengths[:2]) + max(lengths[2:]))
    assert report.padding_share == pytest.approx(1 - sum(lengths) / num_processed)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_validation_reports_the_mean_over_all_targets(
    tmp_path: Path, micro_batch_size: int
) -> None:
    model = copy.deepcopy(random_model(num_key_value_heads=2))
    expected = tree_loss(model, batch_trees(ROWS, PAD_ID)).item()
    trainer = trainer_of(tmp_path, model, [], micro_batch_size=micro_batch_size)

    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert trainer.last_validation_loss == pytest.approx(expected, abs=1e-5)


def test_gradient_checkpointing_does_not_change_training(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path, micro_batch_size=4, num_steps=2)
    checkpointed, _ = trained(
        tmp_path, micro_batch_size=4, num_steps=2, gradient_checkpointing=True
    )

    for weights, expected in zip(checkpointed, plain, strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def test_bfloat16_changes_the_forward_pass_and_weights_stay_float32(tmp_path: Path) -> None:
    plain, (expected,) = trained(tmp_path, micro_batch_size=4)
    weights, (report,) = trained(tmp_path, micro_batch_size=4, dtype="bfloat16")

    assert report.loss != expected.loss
    assert report.loss == pytest.approx(expected.loss, rel=0.02)
    assert all(part.dtype == torch.float32 for part in weights)
    assert any(not torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def test_gradients_are_clipped(tmp_path: Path) -> None:
    before = [parameter.detach() for parameter in random_model(num_key_value_heads=2).parameters()]

    def moved(norm: float) -> float:
        weights, _ = trained(tmp_path, max_gradient_norm=norm)
        return max(float((a - b).abs().max()) for a, b in zip(weights, before, strict=True))

    # A gradient far below AdamW's epsilon changes nothing.
    assert moved(1e-12) < 0.1 * moved(1.0)
