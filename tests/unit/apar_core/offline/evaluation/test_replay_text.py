"""Tokenizers for replay: round trip, control tokens and token counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from apar_core.errors import EvaluationError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.replay_text import (
    LLAMA_TOKENIZER,
    ModelText,
    load_text,
    vicuna_prompt,
)
from tests.fakes.examples import num_examples

LLAMA = load_text(LLAMA_TOKENIZER)
TINY = load_text(str(checkpoint_path()))
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["\n\n1. **A**: b", " x", "  ", "[Fork] and [Child]", "</s><eos>", "中文。", "\r\n"]
)


@pytest.mark.parametrize("text", [LLAMA, TINY], ids=["llama", "apar-tiny"])
@settings(max_examples=num_examples(60), deadline=None)
@given(st.data())
def test_concatenated_pieces_decode_to_their_texts(text: ModelText, data: Any) -> None:
    # SentencePiece writes a space as "▁".
    drawn = data.draw(st.lists(TEXTS, max_size=4))
    pieces = [piece.replace("▁", "_").replace("<eos>", "") for piece in drawn]

    ids = [token_id for piece in pieces for token_id in text.encode(piece)]

    assert text.decode(ids) == "".join(pieces)
    assert not {text.tokens.fork_id, text.tokens.child_id} & set(ids)
    assert all(0 <= token_id < text.vocabulary_size for token_id in ids)


def test_the_stand_in_has_llamas_size_and_the_released_control_ids() -> None:
    assert LLAMA.vocabulary_size == 32_002
    assert (LLAMA.tokens.fork_id, LLAMA.tokens.child_id, LLAMA.tokens.end_id) == (32_000, 32_001, 2)
    english = "The quick brown fox jumps over the lazy dog, and nobody minds it very much. " * 5
    assert 3.5 < len(english) / len(LLAMA.encode(english)) < 5


def test_a_chat_without_template_has_vicunas_format() -> None:
    chat = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "Hello"),
        ChatMessage("user", "Why?"),
    ]

    assert vicuna_prompt(chat) == ("Be brief. USER: Hi ASSISTANT: Hello</s>USER: Why? ASSISTANT:")
    assert vicuna_prompt(chat[1:2]).startswith("A chat between a curious user and an artificial")
    ids = LLAMA.encode_chat(chat)
    assert ids[0] == 1
    assert ids.count(LLAMA.tokens.end_id) == 1


def test_a_model_without_control_tokens_has_no_tree_tokens() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] not in ("[Fork]", "[Child]")
    ]
    for text in ("[Fork]", "[Child]"):
        state["model"]["vocab"].pop(text, None)
    ordinary = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))

    ordinary.eos_token = "<eos>"
    model_text = ModelText(ordinary, "some-model")

    assert model_text.decode(model_text.encode("Write [Fork].")) == "Write [Fork]."
    with pytest.raises(EvaluationError, match="some-model has no fork and child token"):
        _ = model_text.tokens


def test_a_name_without_a_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(EvaluationError, match="no tokenizer in"):
        load_text(str(tmp_path))
