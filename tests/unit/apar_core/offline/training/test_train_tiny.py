"""Training of the embedded model, at a size that takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.pretrained import tree_tokens
from apar_core.offline.training.train_tiny import (
    TinyModelSettings,
    TinyTrainingSettings,
    TrainingPhase,
    tiny_recipe,
    train_tiny,
)
from apar_core.offline.training.tree_trainer import StepReport

SMALL_MODEL = TinyModelSettings(
    vocabulary_size=320, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
RECIPE = tiny_recipe().model_copy(update={"num_executors": 1})
BROAD_PHASE = RECIPE.phases[0]


def one_phase(**changes: object) -> TrainingPhase:
    small = {"num_steps": 25, "batch_size": 2, "micro_batch_size": 2}
    recipe = BROAD_PHASE.recipe.model_copy(update=small | changes)
    return BROAD_PHASE.model_copy(update={"recipe": recipe})


SHORT = TinyTrainingSettings(phases=(one_phase(),), num_executors=1).with_num_steps(4)


def weights_after_training(folder: Path, settings: TinyTrainingSettings) -> dict[str, torch.Tensor]:
    train_tiny(folder, SMALL_MODEL, settings, lambda report: None)
    return load_file(folder / "model.safetensors")


def test_training_is_repeatable_and_depends_on_the_seed(tmp_path: Path) -> None:
    first = weights_after_training(tmp_path / "a", SHORT)
    again = weights_after_training(tmp_path / "b", SHORT)
    other = weights_after_training(tmp_path / "c", SHORT.model_copy(update={"seed": 1}))

    assert all(torch.equal(again[name], weight) for name, weight in first.items())
    assert any(not torch.equal(other[name], weight) for name, weight in first.items())
    assert all(weight.dtype == torch.bfloat16 for weight in first.values())


def test_every_step_is_reported_and_the_loss_falls(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    settings = TinyTrainingSettings(phases=(one_phase(learning_rate=0.02),), num_executors=1)

    train_tiny(tmp_path, SMALL_MODEL, settings, reports.append)

    assert [report.step for report in reports] == list(range(1, 26))
    assert all(report.num_steps == 25 and report.num_targets > 0 for report in reports)
    assert sum(r.loss for r in reports[-5:]) < sum(r.loss for r in reports[:5]) - 2


@pytest.mark.parametrize("num_steps", [1, 2, 17, 830, 2380, 5000])
def test_a_recipe_is_stretched_to_any_number_of_steps(num_steps: int) -> None:
    recipe = tiny_recipe()

    stretched = recipe.with_num_steps(num_steps)

    assert stretched.num_steps == num_steps
    share = recipe.phases[0].recipe.num_steps / recipe.num_steps
    assert stretched.phases[0].recipe.num_steps == pytest.approx(num_steps * share, abs=0.5)


def test_the_phases_follow_one_another_on_different_examples(tmp_path: Path) -> None:
    settings = RECIPE.with_num_steps(7)
    reports: list[StepReport] = []

    train_tiny(tmp_path, SMALL_MODEL, settings, reports.append)

    assert [phase.recipe.num_steps for phase in settings.phases] == [4, 1, 1, 1]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6, 7]
    drawn = [
        list(Corpus(0, kind_weights=phase.kind_weights, stream=phase.stream).examples(20))
        for phase in settings.phases
    ]
    assert all(drawn[i] != drawn[j] for i in range(4) for j in range(i))


def test_the_shipped_checkpoint_is_small_and_complete() -> None:
    folder = checkpoint_path()
    config = AutoConfig.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 12_000_000
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.max_position_embeddings == 2048
    assert config.vocab_size == len(tokenizer) <= 4096
    tokens = tree_tokens(tokenizer)
    assert tokenizer.convert_ids_to_tokens([tokens.fork_id, tokens.child_id]) == [
        "[Fork]",
        "[Child]",
    ]
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokens.end_id == tokenizer.eos_token_id
    assert all(
        weight.dtype == torch.bfloat16
        for weight in load_file(folder / "model.safetensors").values()
    )
