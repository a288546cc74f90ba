"""Equality of all decoders, thread by thread: greedy, float32, held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
from apar_core.offline.decoders.draft_model import DraftDecoder
from apar_core.offline.decoders.interface import DecodedAnswer, DecodedThread, decode_answer
from apar_core.offline.decoders.load import DecoderName, build_decoder, load_decoder
from apar_core.offline.evaluation.fork_check import (
    HeldOutSettings,
    TransformersThreadDecoder,
    held_out_prompts,
)
from apar_core.offline.speculation.acceptance import AcceptanceTable, read_table
from apar_core.offline.speculation.medusa_heads import (
    MedusaHeads,
    load_medusa_heads,
    save_medusa_heads,
)
from apar_core.offline.speculation.prompt_tokens import PromptTokens, load_prompt_tokens
from apar_core.offline.speculation.sparse_tree import TreeFamily, optimal_tree
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
    settings = HeldOutSettings(num_prompts=NUM_PROMPTS)
    return tuple(prompt.token_ids for prompt in held_out_prompts(settings, tokenizer()))


def answers(
    name: str, heads: Any = None, top_k: tuple[int, ...] = (2, 2), number: int = NUM_PROMPTS
) -> list[DecodedAnswer]:
    decoder = load_decoder(
        name, model(), tokenizer(), medusa_heads=heads, device="cpu", top_k=top_k
    )
    return [decode_answer(decoder, prompt) for prompt in prompts()[:number]]


def prompted(name: str, number: int) -> Iterator[tuple[list[int], DecodedAnswer]]:
    """Yield prompts with their answers, with prompt tokens in trees of 16 inputs."""
    folder = SHIPPED_PROMPTS["apar-tiny"]
    ensemble = load_prompt_tokens(folder).settings.ensemble
    trees = TreeFamily.of(optimal_tree(read_table(folder), 16, ensemble))
    decoder = load_decoder(
        name, model(), tokenizer(), prompt_tokens=folder, trees=trees, device="cpu"
    )
    for prompt in held_out_prompts(HeldOutSettings(num_prompts=number), tokenizer()):
        yield prompt.token_ids, decode_answer(decoder, prompt.token_ids)


@cache
def vanilla() -> list[DecodedAnswer]:
    return answers("vanilla_apar")


def by_thread(threads: Any) -> dict[str, DecodedThread]:
    return {thread.thread: thread for thread in threads}


def num_passes(found: list[DecodedAnswer]) -> int:
    return sum(len(answer.trace) for answer in found)


@pytest.mark.ci
def test_vanilla_apar_decodes_every_thread_like_plain_decoding_of_its_prefix() -> None:
    tokens = tree_tokens(tokenizer())
    reference = TransformersThreadDecoder(model(), tokens, tokens.end_id)

    expected = reference(prompts())

    found = [answer.threads for answer in vanilla()]
    assert sum(len(threads) > 1 for threads in expected) > NUM_PROMPTS // 2
    assert [by_thread(threads) for threads in found] == [by_thread(threads) for threads in expected]


@pytest.mark.parametrize(
    "top_k", [(1,), *(pytest.param(k, marks=pytest.mark.ci) for k in [(2, 2), (4, 4)])]
)
def test_medusa_apar_equals_vanilla_apar_in_fewer_passes(
    top_k: tuple[int, ...],
) -> None:
    found = answers("medusa_apar", SHIPPED_HEADS["apar-tiny"], top_k)

    assert [by_thread(answer.threads) for answer in found] == [
        by_thread(answer.threads) for answer in vanilla()
    ]
    assert num_passes(found) < 0.7 * num_passes(vanilla())


def test_medusa_apar_with_random_heads_equals_vanilla_apar(tmp_path: Any) -> None:
    torch.manual_seed(0)
    save_medusa_heads(MedusaHeads(load_medusa_heads(SHIPPED_HEADS["apar-tiny"]).settings), tmp_path)

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base", "number"), [("ppd_apar", "vanilla_apar", 60), ("ppd", "plain", 300)]
)
def test_prompt_tokens_do_not_change_300_threads(name: str, base: str, number: int) -> None:
    decoder = load_decoder(base, model(), tokenizer(), device="cpu")
    num_threads = num_fewer = 0

    for prompt, found in prompted(name, number):
        expected = decode_answer(decoder, prompt)

        assert by_thread(found.threads) == by_thread(expected.threads)
        num_threads += len(found.threads)
        num_fewer += len(expected.trace) - len(found.trace)

    assert num_threads >= 300
    # Guesses were accepted, so they were verified.
    assert num_fewer > num_threads


@pytest.mark.parametrize("name", ["plain", "ppd"])
def test_a_smaller_draft_model_does_not_change_the_answer(name: DecoderName) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model().config.vocab_size, hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, initializer_range=0.5,
    )  # fmt: skip
    small = LlamaForCausalLM(config).eval()
    prompts_of_draft = PromptTokens.like_text(small) if name == "ppd" else None
    table = AcceptanceTable(probabilities=((0.3, 0.1),) * 3)
    target = load_decoder("plain", model(), tokenizer(), device="cpu")
    draft = build_decoder(
        name, small, target.control, target.end_ids, prompts=prompts_of_draft,
        trees=None if prompts_of_draft is None else (lambda _rows: optimal_tree(table, 12).trees),
    )  # fmt: skip
    both = DraftDecoder(target, draft)

    for prompt, expected in zip(prompts()[:3], answers("plain", number=3), strict=True):
        assert decode_answer(both, prompt).threads == expected.threads
    assert both.draft_passes > 0
