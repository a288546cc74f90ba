"""Training of the embedded model at a small size; its tokenizer and chat template."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import Linear
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from apar_core.errors import TrainingError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.apar_tiny_threadweaver import checkpoint_path as joins_path
from apar_core.offline.data.joined import MARKERS
from apar_core.offline.data.records import ExampleRecord
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.packing import PackedTree
from apar_core.offline.training.pretrained import tree_tokens
from apar_core.offline.training.recipe import (
    TinyModelSettings,
    TinyTrainingSettings,
    TrainingPhase,
    TrainingRecipe,
)
from apar_core.offline.training.train_tiny import (
    MIXTURES,
    SPECIAL_TOKENS,
    CorpusTrees,
    WeightAverage,
    tiny_recipe,
    train_tiny,
    train_tiny_joins,
    train_tokenizer,
)
from apar_core.offline.training.tree_trainer import StepReport
from tests.fakes.examples import num_examples


class PacksNothing:
    def pack(self, example: ExampleRecord) -> PackedTree:
        raise NotImplementedError


TEXTS = ["Give me 12 tips, please.", "Give me tips for tea.", "More tips for tea."] * 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocabulary_size=300, max_length=64)


def test_the_vocabulary_has_its_size_and_starts_with_the_special_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert len(tokenizer) <= 300
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == [*SPECIAL_TOKENS]


def test_steps_of_the_corpus_count_trees_only() -> None:
    recipe = TrainingRecipe(batch_size=4, num_steps=1, learning_rate=1.0, batch_unit="sequences")

    with pytest.raises(TrainingError, match="batch_unit: steps of the embedded model count trees"):
        CorpusTrees((), "", 0, recipe, PacksNothing(), 1)


def test_digits_are_separate_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("12 345", add_special_tokens=False).input_ids
    pieces = [str(tokenizer.decode([token_id])) for token_id in ids]

    assert [piece for piece in pieces if piece.isdigit()] == ["1", "2", "3", "4", "5"]


@cache
def shipped_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path())


@settings(max_examples=num_examples(100), deadline=None)
@given(parts=st.lists(st.text(), max_size=4))
def test_separately_encoded_parts_decode_to_their_concatenation(parts: list[str]) -> None:
    shipped = shipped_tokenizer()

    ids = [i for part in parts for i in shipped(part, add_special_tokens=False).input_ids]

    assert shipped.decode(ids) == "".join(parts)


def test_the_same_texts_give_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer(TEXTS, vocabulary_size=300, max_length=64)

    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_chat_has_one_role_token_per_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye."},
    ]

    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert text == (
        "<bos><|system|>Be kind.<|user|>Hello!<|assistant|>Hi.<eos><|user|>Bye.<|assistant|>"
    )


def test_an_unknown_role_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(jinja2.TemplateError, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_a_plain_prompt_starts_with_the_first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("tips").input_ids

    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids


def linear(value: float) -> Linear:
    layer = Linear(2, 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def test_weights_are_averaged_by_share() -> None:
    average, model = WeightAverage(), linear(100.0)
    average.add(linear(1.0), 1.0)
    average.add(linear(5.0), 3.0)
    average.add(model, 0.0)

    average.apply(model)

    assert all(torch.equal(p, torch.full_like(p, 4.0)) for p in model.parameters())


def test_without_weights_the_model_is_unchanged() -> None:
    model = linear(7.0)

    WeightAverage().apply(model)

    assert all(torch.equal(p, torch.full_like(p, 7.0)) for p in model.parameters())


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
def test_a_recipe_is_scaled_to_any_number_of_steps(num_steps: int) -> None:
    recipe = tiny_recipe()

    stretched = recipe.with_num_steps(num_steps)

    assert stretched.num_steps == num_steps
    share = recipe.phases[0].recipe.num_steps / recipe.num_steps
    assert stretched.phases[0].recipe.num_steps == pytest.approx(num_steps * share, abs=0.5)


def test_phases_train_in_order_on_different_examples(tmp_path: Path) -> None:
    settings = RECIPE.with_num_steps(7)
    reports: list[StepReport] = []

    train_tiny(tmp_path, SMALL_MODEL, settings, reports.append)

    assert [phase.recipe.num_steps for phase in settings.phases] == [4, 1, 1, 1]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6, 7]
    drawn = [
        list(Corpus(0, kind_weights=MIXTURES[phase.mixture], stream=phase.stream).examples(20))
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


def test_the_checkpoint_that_joins_is_small_and_has_the_markers_instead() -> None:
    folder = joins_path()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    vocabulary = tokenizer.get_vocab()

    assert (folder / "model.safetensors").stat().st_size < 9_000_000
    assert AutoConfig.from_pretrained(folder).vocab_size == len(tokenizer)
    assert all(vocabulary[marker] in tokenizer.all_special_ids for marker in MARKERS)
    assert "[Fork]" not in vocabulary
    assert tokenizer.chat_template == shipped_tokenizer().chat_template


@pytest.mark.slow
def test_training_of_joins_is_repeatable_and_the_loss_falls(tmp_path: Path) -> None:
    recipe = tiny_recipe("apar-tiny-threadweaver").with_num_steps(12)
    reports: list[StepReport] = []

    for name in ("a", "b"):
        train_tiny_joins(tmp_path / name, recipe, reports.append, checkpoint=checkpoint_path())

    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(again[name], weight) for name, weight in first.items())
    losses = [report.loss for report in reports[:12]]
    assert [report.step for report in reports[:12]] == list(range(1, 13))
    # Answers with blocks are long, others short: the largest losses are those of blocks.
    assert max(losses[8:]) < max(losses[:8])
