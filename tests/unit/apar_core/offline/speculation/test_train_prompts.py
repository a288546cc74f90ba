"""Training of prompt tokens, and those that are shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import kl_div

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
from apar_core.offline.evaluation.own_answers import measure_and_write
from apar_core.offline.speculation.acceptance import read_table
from apar_core.offline.speculation.frozen_training import train_beside, train_tiny_beside
from apar_core.offline.speculation.prompt_tokens import check_prompt_tokens, load_prompt_tokens
from apar_core.offline.speculation.train_prompts import PROMPT_TOKENS, distillation_loss
from apar_core.offline.training.pretrained import load_model
from apar_core.offline.training.recipe import PromptRecipe
from apar_core.offline.training.tree_trainer import StepReport
from tests.fakes.example_files import write_examples
from tests.unit.apar_core.offline.speculation.test_train_medusa import examples

RECIPE = PromptRecipe(
    batch_size=4, micro_batch_size=2, num_steps=12, learning_rate=3e-2, dtype="float32",
    context_length=256, structured_share=1.0, validation_share=0.5, validate_every_steps=50,
    save_every_steps=6, log_every_steps=1, num_prompts=2, ensemble=2, num_measured=2,
)  # fmt: skip


def run(tmp_path: Path, name: str, recipe: PromptRecipe = RECIPE, *, resume: bool = False) -> Path:
    write_examples(tmp_path / "examples.jsonl", examples())
    train_beside(
        PROMPT_TOKENS, str(checkpoint_path()), tmp_path / "examples.jsonl", tmp_path / name, recipe,
        measure=measure_and_write, resume=resume,
    )  # fmt: skip
    return tmp_path / name


def test_prompt_tokens_learn_while_the_model_is_frozen(tmp_path: Path) -> None:
    write_examples(tmp_path / "examples.jsonl", examples())
    reports: list[StepReport] = []
    before = load_file(checkpoint_path() / "model.safetensors")

    result = train_beside(
        PROMPT_TOKENS, str(checkpoint_path()), tmp_path / "examples.jsonl", tmp_path / "out",
        RECIPE, measure=measure_and_write, on_step=reports.append,
    )  # fmt: skip

    prompts = load_prompt_tokens(tmp_path / "out")
    assert prompts.embeddings.shape == (2, 2, 256)
    assert reports[-1].loss < 0.7 * reports[0].loss
    assert result.validation_loss is not None
    assert result.validation_loss < reports[0].loss
    assert result.table == read_table(tmp_path / "out")
    assert result.table.num_distances == 2
    model = load_model(str(checkpoint_path()), torch.float32, torch.device("cpu"))
    check_prompt_tokens(prompts, model)
    after = load_file(checkpoint_path() / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole")
    last = whole / "checkpoints" / "checkpoint-12"
    expected = load_prompt_tokens(whole).embeddings

    for path in sorted(last.iterdir()):
        path.unlink()
    last.rmdir()
    resumed = run(tmp_path, "whole", resume=True)

    assert torch.equal(load_prompt_tokens(resumed).embeddings, expected)


@pytest.mark.parametrize(
    "change",
    [{"loss": "reverse_kl"}, {"loss": "labels"}, {"average": "learned"},
     {"average": "probabilities"}, {"mask": "decoder"}, {"mask": "encoder"}, {"exits": 2},
     {"prefix": True}, {"head": "one stage"}],
    ids=str,
)  # fmt: skip
def test_settings_take_effect(tmp_path: Path, change: dict[str, Any]) -> None:
    small = {"num_steps": 2, "validation_share": 0.0}
    changed = run(tmp_path, "changed", RECIPE.model_copy(update={**small, **change}))
    usual = run(tmp_path, "usual", RECIPE.model_copy(update=small))

    assert not torch.equal(
        load_prompt_tokens(changed).embeddings, load_prompt_tokens(usual).embeddings
    )
    # Without validation examples there is nothing to measure acceptance on.
    assert not (usual / "acceptance.json").exists()


def test_a_head_learns_from_the_second_stage_on_at_a_tenth_of_the_rate(tmp_path: Path) -> None:
    write_examples(tmp_path / "examples.jsonl", examples())
    rates: dict[str, list[float]] = {}
    for head in ("one stage", "two stages"):
        reports: list[StepReport] = []
        change = {"num_steps": 6, "validation_share": 0.0, "head": head}
        train_beside(
            PROMPT_TOKENS, str(checkpoint_path()), tmp_path / "examples.jsonl", tmp_path / head,
            RECIPE.model_copy(update=change), measure=measure_and_write, on_step=reports.append,
        )  # fmt: skip
        rates[head] = [report.learning_rate for report in reports]

    assert rates["two stages"][0] == rates["one stage"][0]
    assert rates["two stages"][1:-1] == pytest.approx([0.1 * r for r in rates["one stage"][1:-1]])
    one, two = (load_prompt_tokens(tmp_path / head).head for head in rates)
    first = load_model(str(checkpoint_path()), torch.float32, torch.device("cpu"))
    assert one is not None
    assert two is not None
    output = first.get_output_embeddings().weight
    assert 0 < (two - output).abs().sum() < (one - output).abs().sum()


def test_divergences_are_those_of_torch() -> None:
    student, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))

    forward = distillation_loss(student, teacher, "forward_kl")
    reverse = distillation_loss(student, teacher, "reverse_kl")

    log_student, log_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    expected = kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(forward, expected)
    expected = kl_div(log_teacher, log_student, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(reverse, expected)


def test_prompt_tokens_of_the_embedded_model_are_trained(tmp_path: Path) -> None:
    settings = PROMPT_TOKENS.tiny_recipe()
    small = {"num_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    recipe = settings.recipe.model_copy(update=small)
    settings = settings.model_copy(update={"recipe": recipe, "num_held_out": 2})

    table = train_tiny_beside(
        PROMPT_TOKENS, checkpoint_path(), tmp_path, settings, measure=measure_and_write
    )

    assert table == read_table(tmp_path)
    assert (
        load_prompt_tokens(tmp_path).settings
        == load_prompt_tokens(SHIPPED_PROMPTS["apar-tiny"]).settings
    )


def test_the_shipped_prompt_tokens_are_small_and_belong_to_the_embedded_model() -> None:
    prompts, table = (
        load_prompt_tokens(SHIPPED_PROMPTS["apar-tiny"]),
        read_table(SHIPPED_PROMPTS["apar-tiny"]),
    )

    check_prompt_tokens(
        prompts, load_model(str(checkpoint_path()), torch.bfloat16, torch.device("cpu"))
    )
    assert (SHIPPED_PROMPTS["apar-tiny"] / "model.safetensors").stat().st_size < 5_000
    assert table.num_distances == prompts.settings.num_prompts == 3
    assert table.num_ranks == 10
    assert read_table(SHIPPED_HEADS["apar-tiny"]).num_distances == 2
    # Random candidates would be right in 10 of 4,096 cases.
    assert all(best[-1] > 0.2 for best in table.top_k())
