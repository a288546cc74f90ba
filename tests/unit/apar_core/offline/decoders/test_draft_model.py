"""A draft model changes the passes, never the greedy answer of its target."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apar_core.errors import CheckpointError, RequestError
from apar_core.formats.prompt_file import PromptTokenSettings
from apar_core.offline.decoders.draft_model import DraftDecoder
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice, decode_answer
from apar_core.offline.decoders.load import ThreadDecoder, build_decoder
from apar_core.offline.speculation.acceptance import AcceptanceTable
from apar_core.offline.speculation.prompt_tokens import PromptTokens, model_fingerprint
from apar_core.offline.speculation.sparse_tree import dynamic_tree
from tests.unit.apar_core.offline.decoders.small_decoders import (
    CONTROL,
    END,
    MAX_POSITIONS,
    VOCABULARY,
    decoder,
)

TABLE = AcceptanceTable(probabilities=((0.5, 0.2), (0.4, 0.2)), observations=(1, 1), source="test")


@cache
def draft_model(vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=MAX_POSITIONS, initializer_range=0.5,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).double().eval()
    return model


def plain_draft(model: LlamaForCausalLM | None = None) -> ThreadDecoder:
    return build_decoder("plain", model or draft_model(), CONTROL, frozenset({END}))


def prompted_draft() -> ThreadDecoder:
    model = draft_model()
    settings = PromptTokenSettings(
        num_prompts=2, hidden_size=8, fingerprint=model_fingerprint(model)
    )
    prompts = PromptTokens(settings).double()
    torch.manual_seed(3)
    torch.nn.init.normal_(prompts.embeddings)
    tree = dynamic_tree(TABLE, 4, 6)
    return build_decoder(
        "ppd", model, CONTROL, frozenset({END}), prompts=prompts, trees=lambda _rows: tree.trees
    )


def prompts_of(number: int) -> list[list[int]]:
    draw = random.Random(0)
    ordinary = range(5, VOCABULARY)
    return [draw.choices(ordinary, k=draw.randint(1, 12)) for _ in range(number)]


@pytest.mark.parametrize("num_guesses", [1, 4])
@pytest.mark.parametrize("has_prompts", [False, True], ids=["plain draft", "ppd draft"])
def test_the_answer_is_that_of_plain_decoding(has_prompts: bool, num_guesses: int) -> None:
    target = decoder("plain")
    draft = prompted_draft() if has_prompts else plain_draft()
    both = DraftDecoder(target, draft, num_guesses)
    limits = DecodeLimits(max_tokens=40)
    for prompt in prompts_of(5):
        expected = decode_answer(target, prompt, limits=limits)
        found = decode_answer(both, prompt, limits=limits)

        assert found.threads == expected.threads
        assert len(found.trace) <= len(expected.trace)
        assert sum(step.tokens for step in found.trace) == sum(
            step.tokens for step in expected.trace
        )


def test_a_draft_that_is_always_right_saves_passes() -> None:
    target = decoder("plain")
    both = DraftDecoder(target, target, num_guesses=4)
    prompt = prompts_of(1)[0]

    answer = decode_answer(both, prompt, limits=DecodeLimits(max_tokens=41))
    expected = decode_answer(target, prompt, limits=DecodeLimits(max_tokens=41))

    assert answer.threads == expected.threads
    # The prefill yields a token, and every pass four guesses and a token of the target.
    assert len(answer.trace) == 1 + -(-(len(expected.trace) - 1) // 5)
    assert both.draft_passes <= len(expected.trace) + 5


def test_an_answer_ends_at_the_end_of_the_context() -> None:
    target = decoder("plain")
    prompt = prompts_of(1)[0] * 20
    prompt = (prompt * 40)[: MAX_POSITIONS - 9]
    limits = DecodeLimits(max_tokens=100)

    found = decode_answer(DraftDecoder(target, plain_draft(), 6), prompt, limits=limits)

    assert found.threads == decode_answer(target, prompt, limits=limits).threads


def test_a_draft_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vocabulary of 30, the target model of 24"):
        DraftDecoder(decoder("plain"), plain_draft(draft_model(30)))


def test_forking_decoders_are_refused() -> None:
    with pytest.raises(CheckpointError, match="must not fork"):
        DraftDecoder(decoder("vanilla_apar"), plain_draft())


def test_sampling_is_refused() -> None:
    both = DraftDecoder(decoder("plain"), plain_draft())

    with pytest.raises(RequestError, match="greedily only"):
        decode_answer(both, [5, 6], TokenChoice.sampled(0.7))
