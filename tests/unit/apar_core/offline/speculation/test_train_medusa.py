"""Training of Medusa heads on a frozen model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.apar_tiny_medusa import heads_path
from apar_core.offline.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.offline.speculation.medusa_heads import load_medusa_heads
from apar_core.offline.speculation.train_medusa import (
    initial_heads,
    tiny_medusa_recipe,
    train_medusa,
    train_tiny_medusa,
)
from apar_core.offline.training.pretrained import load_model, load_tokenizer
from apar_core.offline.training.recipe import MedusaRecipe
from apar_core.offline.training.tree_trainer import StepReport
from tests.fakes.example_files import write_examples

RECIPE = MedusaRecipe(
    batch_size=4, micro_batch_size=2, num_steps=12, learning_rate=3e-3, dtype="float32",
    context_length=256, structured_share=1.0, validation_share=0.5, validate_every_steps=50,
    save_every_steps=50, log_every_steps=1,
)  # fmt: skip


def examples() -> list[ExampleRecord]:
    answer = chain([(f"{i}. Tune it:", ParagraphRecord(" play slowly.\n")) for i in range(1, 4)])
    return [
        ExampleRecord(
            "ordered_list", (ChatMessage("user", f"Tip {i}?"),), answer, example_id=str(i)
        )
        for i in range(8)
    ]


def test_heads_learn_to_look_ahead_on_a_model_that_stays_as_it_is(tmp_path: Path) -> None:
    write_examples(tmp_path / "examples.jsonl", examples())
    reports: list[StepReport] = []
    before = load_file(checkpoint_path() / "model.safetensors")

    result = train_medusa(
        str(checkpoint_path()), tmp_path / "examples.jsonl", tmp_path / "heads", RECIPE,
        on_step=reports.append,
    )  # fmt: skip

    heads = load_medusa_heads(tmp_path / "heads")
    assert heads.settings.medusa_num_heads == heads.settings.medusa_num_layers == 2
    assert next(heads.parameters()).dtype == torch.bfloat16
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert result.validation_loss is not None
    assert result.validation_loss < reports[0].loss
    assert len(result.accuracy) == 2
    assert all(0 < share <= 1 for share in result.accuracy)
    after = load_file(checkpoint_path() / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_heads_start_as_the_models_own_output_layer() -> None:
    model = load_model(str(checkpoint_path()), torch.float32, torch.device("cpu"))

    heads = initial_heads(model, num_heads=3, num_layers=1)

    hidden = torch.randn(4, model.config.hidden_size)
    expected = model.get_output_embeddings()(hidden)
    assert torch.equal(heads(hidden), expected.expand(3, -1, -1))


def test_the_embedded_models_heads_are_made_by_the_same_code(tmp_path: Path) -> None:
    settings = tiny_medusa_recipe()
    small = {"num_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    recipe = settings.recipe.model_copy(update=small)
    settings = settings.model_copy(update={"recipe": recipe, "num_held_out": 2})

    accuracy = train_tiny_medusa(checkpoint_path(), tmp_path, settings)

    assert len(accuracy) == 2
    assert load_medusa_heads(tmp_path).settings == load_medusa_heads(heads_path()).settings


def test_the_shipped_heads_are_small_and_fit_the_embedded_model() -> None:
    folder = heads_path()

    heads = load_medusa_heads(folder)

    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 6_000_000
    assert heads.settings.vocab_size == len(load_tokenizer(str(checkpoint_path())))
    assert heads.settings.hidden_size == 256
    assert heads.settings.medusa_num_heads == heads.settings.medusa_num_layers == 2
