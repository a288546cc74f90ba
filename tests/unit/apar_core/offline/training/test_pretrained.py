"""Control tokens added to models without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from apar_core.errors import TrainingError
from apar_core.formats.control_tokens import ControlTokens, find_control_tokens
from apar_core.formats.shipped_formats import HPD_PARSING, PARALLEL_R1
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.apar_tiny_threadweaver import checkpoint_path as joins_path
from apar_core.offline.data.joined import MARKERS
from apar_core.offline.training.joined_encoder import MARKER_TOKENS
from apar_core.offline.training.pretrained import (
    CONTROL_TOKENS,
    FormatTokens,
    add_tokens,
    load_tokenizer,
    save_pretrained,
    tree_tokens,
    with_tokens,
)
from apar_core.offline.training.train_tiny import train_tokenizer
from tests.unit.apar_core.offline.training.plain_tokenizer import plain_tokenizer


def model(num_rows: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=num_rows, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=tied, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def add_control_tokens(
    trained: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, multiple: int
) -> ControlTokens:
    add_tokens(trained, tokenizer, CONTROL_TOKENS, multiple=multiple, seed=0)
    control = find_control_tokens(tokenizer.get_vocab())
    assert control is not None
    return control


def input_rows(trained: LlamaForCausalLM) -> Tensor:
    weight = trained.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def output_rows(trained: LlamaForCausalLM) -> Tensor:
    weight: Tensor = trained.lm_head.weight
    return weight


def test_settings_that_transformers_refuses_to_save_are_kept(tmp_path: Path) -> None:
    tokenizer = plain_tokenizer()
    trained = model(len(tokenizer), tied=True)
    trained.generation_config = GenerationConfig(eos_token_id=1, temperature=0.7, top_p=0.9)
    with pytest.raises(ValueError, match="do_sample"):
        trained.save_pretrained(tmp_path / "refused")

    save_pretrained(trained, dict(trained.state_dict()), tokenizer, tmp_path / "out")

    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"], saved["eos_token_id"]) == (0.7, 0.9, 1)
    assert trained.generation_config.temperature == 0.7
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False])
def test_two_rows_are_added_and_the_vocabulary_is_padded(tied: bool) -> None:
    tokenizer = plain_tokenizer()
    size = len(tokenizer)
    trained = model(size, tied=tied)
    before = input_rows(trained).detach().clone()

    control = add_control_tokens(trained, tokenizer, multiple=64)

    assert {control.fork_id, control.child_id} == {size, size + 1}
    rows = input_rows(trained)
    head = output_rows(trained)
    assert len(rows) == len(head) == trained.config.vocab_size == -(-(size + 2) // 64) * 64
    assert (head is rows) == tied
    assert torch.equal(rows[:size], before)
    assert tree_tokens(tokenizer).fork_id == control.fork_id


@pytest.mark.parametrize("known", [True, False], ids=["in the tokenizer", "in neither"])
@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_start_near_the_mean_but_differ(tied: bool, known: bool) -> None:
    tokenizer = plain_tokenizer()
    size = len(tokenizer)
    if known:
        tokenizer.add_tokens(["[Fork]", "[Child]"], special_tokens=True)
    trained = model(size, tied=tied)

    control = add_control_tokens(trained, tokenizer, multiple=1)

    for matrix in (input_rows(trained), output_rows(trained)):
        old = matrix[:size]
        distances = (old - old.mean(0)).norm(dim=1)
        fork, child = matrix[control.fork_id], matrix[control.child_id]
        for row in (fork, child):
            assert (row - old.mean(0)).norm() < 0.3 * distances.mean()
        assert not torch.equal(fork, child)


def test_earlier_predictions_hardly_change() -> None:
    tokenizer = plain_tokenizer()
    size = len(tokenizer)
    trained = model(size, tied=False)
    prompt = torch.tensor([[1, 5, 9, 20]])
    with torch.inference_mode():
        before = trained(input_ids=prompt).logits.softmax(-1)
    add_control_tokens(trained, tokenizer, multiple=1)
    with torch.inference_mode():
        after = trained(input_ids=prompt).logits.softmax(-1)

    assert (after[..., size:].sum(-1) < 4 / size).all()
    assert torch.equal(after[..., :size].argmax(-1), before.argmax(-1))


def test_spare_rows_are_used_and_never_removed() -> None:
    tokenizer = plain_tokenizer()
    trained = model(1024, tied=False)

    add_control_tokens(trained, tokenizer, multiple=64)

    assert len(input_rows(trained)) == 1024


def test_a_checkpoint_with_control_tokens_is_unchanged() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    trained = LlamaForCausalLM.from_pretrained(checkpoint_path())
    before = input_rows(trained).detach().clone()

    add_control_tokens(trained, tokenizer, multiple=64)

    assert len(tokenizer) == 4096
    assert torch.equal(input_rows(trained), before)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("known", [(), ("<Parallel>", "</Parallel>")], ids=["none", "two known"])
def test_a_marker_starts_as_the_mean_of_its_word(tied: bool, known: tuple[str, ...]) -> None:
    tokenizer: PreTrainedTokenizerBase = plain_tokenizer()
    tokenizer.add_tokens(list(known), special_tokens=True)
    size = len(tokenizer)
    trained = model(size, tied=tied)
    trained.lm_head.bias = torch.nn.Parameter(torch.arange(float(size)))
    before = [input_rows(trained).clone(), output_rows(trained).clone()]
    before_V = trained.lm_head.bias.clone()

    tokenizer = add_tokens(trained, tokenizer, MARKER_TOKENS, multiple=64, seed=0)

    vocabulary = tokenizer.get_vocab()
    assert len(input_rows(trained)) == -(-(size + 10 - len(known)) // 64) * 64
    bias_V = trained.lm_head.bias
    for old, rows in zip(before, (input_rows(trained), output_rows(trained)), strict=True):
        assert torch.equal(rows[:size], old)
        for marker in MARKERS[len(known) :]:
            words = tokenizer(marker.strip("<>"), add_special_tokens=False).input_ids
            torch.testing.assert_close(rows[vocabulary[marker]], old[words].mean(0))
            torch.testing.assert_close(bias_V[vocabulary[marker]], before_V[words].mean())
    assert torch.equal(bias_V[:size], before_V)


def test_markers_take_the_ids_of_control_tokens() -> None:
    tokenizer = load_tokenizer(str(checkpoint_path()))
    control = find_control_tokens(tokenizer.get_vocab())
    assert control is not None
    trained = LlamaForCausalLM.from_pretrained(checkpoint_path())
    before = input_rows(trained).detach().clone()

    tokenizer = add_tokens(trained, tokenizer, MARKER_TOKENS, multiple=1, seed=0)

    vocabulary = tokenizer.get_vocab()
    assert find_control_tokens(vocabulary) is None
    assert MARKER_TOKENS.ids(vocabulary) == [control.fork_id, control.child_id, *range(4096, 4104)]
    rows = input_rows(trained)
    others = [i for i in range(4096) if i not in (control.fork_id, control.child_id)]
    assert torch.equal(rows[others], before[others])
    words = tokenizer("Parallel", add_special_tokens=False).input_ids
    torch.testing.assert_close(rows[vocabulary["<Parallel>"]], before[words].mean(0))


def test_a_checkpoint_with_the_markers_is_unchanged() -> None:
    tokenizer = load_tokenizer(str(joins_path()))
    trained = LlamaForCausalLM.from_pretrained(joins_path())
    before = input_rows(trained).detach().clone()

    assert add_tokens(trained, tokenizer, MARKER_TOKENS, multiple=64, seed=0) is tokenizer
    assert torch.equal(input_rows(trained), before)


@pytest.mark.parametrize(
    ("tokens", "wanted", "found"),
    [
        (MARKERS, CONTROL_TOKENS, "threadweaver"),
        (PARALLEL_R1.tokens, MARKER_TOKENS, "parallel-r1"),
        (HPD_PARSING.tokens, CONTROL_TOKENS, "hpd-parsing"),
    ],
    ids=["threadweaver", "parallel-r1", "hpd-parsing"],
)
def test_a_model_of_another_format_is_refused(
    tokens: Sequence[str], wanted: FormatTokens, found: str
) -> None:
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(list(tokens), special_tokens=True)

    with pytest.raises(TrainingError, match=f"tokens of format '{found}'.*one format: train its"):
        with_tokens(tokenizer, wanted)
    with pytest.raises(TrainingError, match=f"tokens of format '{found}', but this needs"):
        tree_tokens(tokenizer)


def test_a_tokenizer_without_control_or_end_tokens_has_no_tree_tokens() -> None:
    with pytest.raises(TrainingError, match="no control tokens"):
        tree_tokens(plain_tokenizer())
    endless = train_tokenizer(["a b"], vocabulary_size=320, max_length=8)
    endless.chat_template = None
    endless.eos_token = None
    with pytest.raises(TrainingError, match="no end-of-sequence"):
        tree_tokens(endless)
