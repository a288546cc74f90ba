"""Training of the embedded model, at a size that takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from apar_core.data.records import ChatMessage, ExampleRecord, ParagraphRecord, chain
from apar_core.data.tiny_corpus.generator import Corpus
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.training.tiny_model import build_tiny_model, tree_tokens
from apar_core.training.tiny_settings import (
    BROAD_PHASE,
    TinyModelSettings,
    TinyTrainingSettings,
)
from apar_core.training.tokenizer import train_tokenizer
from apar_core.training.train_tiny import (
    StepReport,
    build_optimizers,
    pack_example,
    prompt_token_ids,
    rate_factor,
    train_tiny,
)

SMALL_MODEL = TinyModelSettings(
    vocabulary_size=320, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
ONE_PHASE = BROAD_PHASE.model_copy(update={"num_steps": 25, "trees_per_step": 2})
SHORT = TinyTrainingSettings(phases=(ONE_PHASE,), num_executors=1).with_num_steps(4)


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
    phase = ONE_PHASE.model_copy(update={"vector_learning_rate": 0.02})
    settings = TinyTrainingSettings(phases=(phase,), num_executors=1)

    train_tiny(tmp_path, SMALL_MODEL, settings, reports.append)

    assert [report.step for report in reports] == list(range(1, 26))
    assert all(report.num_steps == 25 and report.num_targets > 0 for report in reports)
    assert sum(r.loss for r in reports[-5:]) < sum(r.loss for r in reports[:5]) - 2


def test_the_learning_rate_rises_stays_and_falls() -> None:
    phase = BROAD_PHASE.model_copy(
        update={"num_steps": 100, "warmup_share": 0.1, "decay_share": 0.5}
    )

    assert rate_factor(0, phase) == pytest.approx(0.1)
    assert rate_factor(9, phase) == rate_factor(50, phase) == 1
    assert rate_factor(75, phase) == pytest.approx(0.5)
    assert rate_factor(100, phase) == 0


@pytest.mark.parametrize("num_steps", [1, 2, 17, 830, 2380, 5000])
def test_a_recipe_is_stretched_to_any_number_of_steps(num_steps: int) -> None:
    recipe = TinyTrainingSettings()

    stretched = recipe.with_num_steps(num_steps)

    assert stretched.num_steps == num_steps
    share = recipe.phases[0].num_steps / recipe.num_steps
    assert stretched.phases[0].num_steps == pytest.approx(num_steps * share, abs=0.5)


def test_the_phases_follow_one_another_on_different_examples(tmp_path: Path) -> None:
    settings = TinyTrainingSettings(num_executors=1).with_num_steps(7)
    reports: list[StepReport] = []

    train_tiny(tmp_path, SMALL_MODEL, settings, reports.append)

    assert [phase.num_steps for phase in settings.phases] == [4, 1, 1, 1]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6, 7]
    drawn = [
        list(Corpus(0, kind_weights=phase.kind_weights, stream=phase.stream).examples(20))
        for phase in settings.phases
    ]
    assert all(drawn[i] != drawn[j] for i in range(4) for j in range(i))


def test_muon_gets_the_matrices_of_the_layers_and_adamw_all_else() -> None:
    tokenizer = train_tokenizer(["a b"], vocabulary_size=320, max_length=64)
    model = build_tiny_model(SMALL_MODEL, tokenizer)

    muon, adamw = build_optimizers(model, BROAD_PHASE, momentum=0.5)

    num_muon = len(muon.param_groups[0]["params"])
    assert num_muon == 7
    assert num_muon + len(adamw.param_groups[0]["params"]) == len(list(model.parameters()))
    assert muon.param_groups[0]["momentum"] == 0.5
    assert [o.param_groups[0]["lr"] for o in (muon, adamw)] == [0.02, 4e-3]


def test_an_example_is_packed_behind_the_prompt_that_the_server_sends() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    answer = chain([("One:", ParagraphRecord(" detail."))])
    chat = ExampleRecord("numbered", (ChatMessage("user", "Hello"),), answer)
    raw = ExampleRecord("numbered", (ChatMessage("user", "Hello"),), answer, raw_prompt=True)

    text = tokenizer.decode(pack_example(chat, tokenizer).token_ids)

    assert text == "<bos><|user|>Hello<|assistant|>One:[Fork][Child] detail.<eos><eos>"
    assert tokenizer.decode(prompt_token_ids(raw, tokenizer)) == "<bos>Hello"


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
