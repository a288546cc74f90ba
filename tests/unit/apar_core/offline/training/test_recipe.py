"""Shipped recipes and recipe files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from apar_core.errors import TrainingError
from apar_core.offline.training.recipe import (
    LoraSettings,
    MedusaRecipe,
    MuonSettings,
    PromptRecipe,
    Schedule,
    TinySettings,
    TinyTrainingSettings,
    TrainingRecipe,
    load_recipe,
    shipped_recipes,
)

SMALL = TrainingRecipe(batch_size=12, micro_batch_size=2, num_steps=10, learning_rate=1e-3)


def test_the_recipe_of_the_paper_is_its_table_5() -> None:
    recipe = load_recipe("apar", TrainingRecipe)

    assert (recipe.batch_size, recipe.num_steps, recipe.learning_rate) == (128, 2000, 2e-5)
    assert (recipe.weight_decay, recipe.schedule.warmup_share) == (0.0, 0.03)
    assert (recipe.schedule.shape, recipe.dtype) == ("cosine", "bfloat16")
    assert (recipe.context_length, recipe.structured_share, recipe.lora) == (2048, 0.5, None)


def test_the_recipe_of_medusa_heads_is_the_papers_table_6() -> None:
    recipe = load_recipe("medusa", MedusaRecipe)

    assert (recipe.batch_size, recipe.num_steps, recipe.learning_rate) == (128, 2000, 1e-3)
    assert (recipe.weight_decay, recipe.schedule.warmup_share) == (0.0, 0.1)
    assert (recipe.num_heads, recipe.num_layers, recipe.context_length) == (2, 2, 2048)


def test_the_recipe_of_prompt_tokens_has_the_ppd_papers_settings() -> None:
    recipe = load_recipe("ppd", PromptRecipe)

    assert (recipe.learning_rate, recipe.context_length, recipe.batch_size) == (1e-2, 1024, 4)
    assert (recipe.schedule.shape, recipe.schedule.warmup_share) == ("cosine", 0.0)
    assert (recipe.num_prompts, recipe.ensemble, recipe.average) == (3, 1, "logits")
    assert (recipe.loss, recipe.alpha) == ("forward_kl", 0.8)


def test_every_shipped_recipe_loads() -> None:
    kinds: dict[str, type[BaseModel]] = {
        "apar": TrainingRecipe,
        "apar-lora": TrainingRecipe,
        "apar-tiny": TinyTrainingSettings,
        "apar-tiny-draft": TinyTrainingSettings,
        "apar-tiny-medusa": TinySettings[MedusaRecipe],
        "apar-tiny-prompts": TinySettings[PromptRecipe],
        "apar-tiny-threadweaver": TinyTrainingSettings,
        "convert": TrainingRecipe,
        "convert-small": TrainingRecipe,
        "medusa": MedusaRecipe,
        "medusa-small": MedusaRecipe,
        "ppd": PromptRecipe,
        "ppd-small": PromptRecipe,
    }

    assert shipped_recipes() == sorted(kinds)
    for name, kind in kinds.items():
        load_recipe(name, kind)
    assert load_recipe("apar-lora", TrainingRecipe).lora is not None


@pytest.mark.parametrize(
    "model",
    [TrainingRecipe, MedusaRecipe, PromptRecipe, LoraSettings, Schedule, MuonSettings],
)
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: 0\nnum_steps: 1\nlearning_rate: 1", "batch_size: Input should be greater"),
        ("batch_size: 1\nnum_steps: 1\nlearning_rate: 1\nbatchsize: 2", "batchsize: Extra inputs"),
        ("batch_size: 1\nnum_steps: 1", "learning_rate: Field required"),
        ("[1, 2]", "recipe: Input should be"),
        ("a: [", "cannot be read"),
    ],
)
def test_an_invalid_recipe_is_refused_naming_the_field(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)

    with pytest.raises(TrainingError, match=r"mine\.yaml") as caught:
        load_recipe(str(file), TrainingRecipe)
    assert message in str(caught.value)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        TrainingError, match="'nothing' is neither a file nor one of apar, apar-lor"
    ):
        load_recipe("nothing", TrainingRecipe)


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("adam_betas: [0.9, 1.5]", TrainingRecipe, "adam_betas.1: Input should be less than 1"),
        ("lora: {rank: 4}", MedusaRecipe, "lora: the model is frozen"),
        ("gradient_checkpointing: true", MedusaRecipe, "gradient_checkpointing: the model is"),
        ("lora: {rank: 4}", PromptRecipe, "lora: the model is frozen"),
        ("loss: kl", PromptRecipe, "loss: Input should be 'forward_kl', 'reverse_kl' or 'labels'"),
        ("insertion_share: 0", PromptRecipe, "insertion_share: Input should be greater than 0"),
        ("alpha: 2", PromptRecipe, "alpha: Input should be less than or equal to 1"),
    ],
)
def test_unsupported_combinations_are_refused_before_loading(
    tmp_path: Path, line: str, kind: type[TrainingRecipe], message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"batch_size: 4\nnum_steps: 2\nlearning_rate: 1.0e-3\n{line}\n")

    with pytest.raises(TrainingError, match=message):
        load_recipe(str(path), kind)
