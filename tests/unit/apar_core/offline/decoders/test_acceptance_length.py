"""Tokens per step on apar-tiny, predicted from acceptance tables and measured by decoding."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS, SHIPPED_PROMPTS
from apar_core.offline.decoders.interface import DecodeLimits, TokenChoice
from apar_core.offline.decoders.load import ThreadDecoder, load_decoder
from apar_core.offline.decoders.thread_family import Thread, ThreadFamily
from apar_core.offline.decoders.tree_decoder import AnswerRun
from apar_core.offline.evaluation.fork_check import HeldOutSettings, held_out_prompts
from apar_core.offline.speculation.acceptance import read_table
from apar_core.offline.speculation.sparse_tree import TreeFamily, optimal_tree, static_tree

NUM_PROMPTS, NUM_RESAMPLES = 30, 1000


def step_lengths(decoder: ThreadDecoder, prompt: list[int], most: int) -> list[int]:
    """Return the tokens of each step of each thread, where `most` and one more tokens were left.

    Whether a step counts must not depend on its length, and nothing may be cut off by the end.
    """
    greedy = TokenChoice.greedy()
    tokens = decoder.decoding.tokens
    family = ThreadFamily(
        len(prompt), tokens, decoder.end_ids, greedy, DecodeLimits(), decoder.max_positions
    )
    run = AnswerRun(decoder.decoding, family, greedy, prompt)

    def size(thread: Thread) -> int:
        return len(thread.token_ids) + thread.ended

    steps: list[tuple[Thread, int, int]] = []
    while run.rows:
        before = {thread: size(thread) for thread in family.threads}
        run.step()
        for thread, start in before.items():
            # The first token of a thread is chosen after its prompt or child token.
            if size(thread) > start > 0:
                steps.append((thread, start, size(thread) - start))
    return [length for thread, start, length in steps if size(thread) - start > most + 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder", "build"),
    [
        ("ppd_apar", SHIPPED_PROMPTS["apar-tiny"], static_tree),
        ("ppd_apar", SHIPPED_PROMPTS["apar-tiny"], optimal_tree),
        ("medusa_apar", SHIPPED_HEADS["apar-tiny"], static_tree),
    ],
)
def test_the_predicted_length_lies_in_the_interval_of_the_measured_one(
    name: str, folder: Path, build: Any
) -> None:
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint_path())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    table = read_table(folder)
    tree = build(table, 10)
    decoder = load_decoder(
        name,
        model,
        tokenizer,
        medusa_heads=folder,
        prompt_tokens=folder,
        trees=TreeFamily.of(tree),
        device="cpu",
    )
    prompts = held_out_prompts(HeldOutSettings(num_prompts=NUM_PROMPTS), tokenizer)

    of_answers = [
        step_lengths(decoder, prompt.token_ids, table.num_distances) for prompt in prompts
    ]

    draws = random.Random(0)
    means = sorted(
        fmean(length for lengths in draws.choices(of_answers, k=NUM_PROMPTS) for length in lengths)
        for _ in range(NUM_RESAMPLES)
    )
    # Answers, not steps, are independent: 99 % interval by resampling them.
    assert means[5] <= tree.expected_length() <= means[-6]
    assert tree.expected_length() > 1.1
