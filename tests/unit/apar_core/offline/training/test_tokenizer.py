"""The embedded model's tokenizer and chat template."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.training.train_tiny import SPECIAL_TOKENS, train_tokenizer

TEXTS = ["Give me 12 tips, please.", "Give me tips for tea.", "More tips for tea."] * 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocabulary_size=300, max_length=64)


def test_the_vocabulary_keeps_its_size_and_starts_with_the_special_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert len(tokenizer) <= 300
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == [*SPECIAL_TOKENS]


def test_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("12 345", add_special_tokens=False).input_ids
    pieces = [str(tokenizer.decode([token_id])) for token_id in ids]

    assert [piece for piece in pieces if piece.isdigit()] == ["1", "2", "3", "4", "5"]


@cache
def shipped_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path())


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.text(), max_size=4))
def test_separately_encoded_parts_decode_to_their_concatenation(parts: list[str]) -> None:
    shipped = shipped_tokenizer()

    ids = [i for part in parts for i in shipped(part, add_special_tokens=False).input_ids]

    assert shipped.decode(ids) == "".join(parts)


def test_the_same_texts_give_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer(TEXTS, vocabulary_size=300, max_length=64)

    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_chat_is_written_with_one_role_token_a_turn(tokenizer: PreTrainedTokenizerFast) -> None:
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
