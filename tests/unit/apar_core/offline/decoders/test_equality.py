"""Equality of all decoders, thread by thread: greedy, float32, held-out prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.apar_tiny_medusa import heads_path
from apar_core.offline.decoders.interface import DecodedAnswer, DecodedThread, decode_answer
from apar_core.offline.decoders.load import load_decoder
from apar_core.offline.evaluation.fork_check import (
    ForkCheckSettings,
    TransformersThreadDecoder,
    held_out_prompts,
)
from apar_core.offline.speculation.medusa_heads import (
    MedusaHeads,
    load_medusa_heads,
    save_medusa_heads,
)
from apar_core.offline.training.pretrained import tree_tokens

NUM_PROMPTS = 8


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path())


@cache
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()


@cache
def prompts() -> tuple[list[int], ...]:
    settings = ForkCheckSettings(num_prompts=NUM_PROMPTS)
    return tuple(prompt.token_ids for prompt in held_out_prompts(settings, tokenizer()))


def answers(
    name: str, heads: Any = None, top_k: tuple[int, ...] = (2, 2), number: int = NUM_PROMPTS
) -> list[DecodedAnswer]:
    decoder = load_decoder(
        name, model(), tokenizer(), medusa_heads=heads, device="cpu", top_k=top_k
    )
    return [decode_answer(decoder, prompt) for prompt in prompts()[:number]]


@cache
def vanilla() -> list[DecodedAnswer]:
    return answers("vanilla_apar")


def by_thread(threads: Any) -> dict[str, DecodedThread]:
    return {thread.thread: thread for thread in threads}


def num_passes(found: list[DecodedAnswer]) -> int:
    return sum(len(answer.trace) for answer in found)


def test_vanilla_apar_decodes_every_thread_like_plain_decoding_of_its_prefix() -> None:
    tokens = tree_tokens(tokenizer())
    reference = TransformersThreadDecoder(model(), tokens, tokens.end_id)

    expected = reference(prompts())

    found = [answer.threads for answer in vanilla()]
    assert sum(len(threads) > 1 for threads in expected) > NUM_PROMPTS // 2
    assert [by_thread(threads) for threads in found] == [by_thread(threads) for threads in expected]


@pytest.mark.parametrize("top_k", [(1,), (2, 2), (4, 4)])
def test_medusa_apar_equals_vanilla_apar_in_fewer_passes(
    top_k: tuple[int, ...],
) -> None:
    found = answers("medusa_apar", heads_path(), top_k)

    assert [by_thread(answer.threads) for answer in found] == [
        by_thread(answer.threads) for answer in vanilla()
    ]
    assert num_passes(found) < 0.7 * num_passes(vanilla())


def test_medusa_apar_with_random_heads_equals_vanilla_apar(tmp_path: Any) -> None:
    torch.manual_seed(0)
    save_medusa_heads(MedusaHeads(load_medusa_heads(heads_path()).settings), tmp_path)

    found = answers("medusa_apar", tmp_path, number=3)

    assert [by_thread(answer.threads) for answer in found] == [
        by_thread(answer.threads) for answer in vanilla()[:3]
    ]
    assert num_passes(found) <= num_passes(vanilla()[:3])


def test_plain_decodes_what_transformers_generates_without_control_tokens() -> None:
    tokens = tree_tokens(tokenizer())

    for prompt, answer in zip(prompts(), answers("plain"), strict=True):
        with torch.inference_mode():
            rows = model().generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=300,
                do_sample=False,
                suppress_tokens=[tokens.fork_id, tokens.child_id],
                eos_token_id=tokens.end_id,
                pad_token_id=tokens.end_id,
            )
        (thread,) = answer.threads
        assert [*thread.token_ids, tokens.end_id] == rows[0, len(prompt) :].tolist()
        assert thread.ended
