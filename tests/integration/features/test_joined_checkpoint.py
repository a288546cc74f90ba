"""The shipped checkpoint that joins: the engine's texts equal those of a resubmitting client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.models.apar_tiny_threadweaver import checkpoint_path
from apar_core.offline.evaluation.join_check import (
    JoinCheckSettings,
    ResubmittingClient,
    check_joins,
)
from apar_core.scheduler.core_state import core_state
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import count_calls, count_drafts
from tests.integration.serving.apar_process import TINY, serving

pytestmark = [pytest.mark.slow, pytest.mark.engine]

NUM_PROMPTS = 24
MAX_TOKENS = 1200
BLOCK_SIZE = 16
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# Room for the longest answer and a few blocks more, so that growing threads preempt others.
SHORT_MEMORY = {"spare_blocks": 8}
# name: (engine arguments, events that must happen)
WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "large batch": ({}, set()),
    "blocks of 32": ({"block_size": 32}, set()),
    "short memory": (SHORT_MEMORY, {"preempted"}),
    "short memory, chunked prefill": (
        {**SHORT_MEMORY, "max_num_batched_tokens": 64, "max_num_seqs": 32},
        {"preempted"},
    ),
    "n-gram speculation": ({"speculative_config": NGRAM}, {"speculated"}),
    "n-gram speculation, short memory": (
        {**SHORT_MEMORY, "speculative_config": NGRAM},
        {"preempted", "speculated"},
    ),
}


@cache
def client_answers() -> tuple[PreTrainedTokenizerFast, list[Any]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    # One prompt per batch: padding would change the last bits.
    client = ResubmittingClient(model, tokenizer, batch_size=1)
    _, answers = check_joins(JoinCheckSettings(num_prompts=NUM_PROMPTS), client)
    return tokenizer, answers


@dataclass(frozen=True)
class Run:
    """Each answer's text, threads and joins; and what happened in the engine."""

    answers: list[tuple[str, int, int]]
    events: set[str]
    state: dict[str, Any]


def generate(engine: OfflineEngine, prompts: list[list[int]]) -> Run:
    """Answer prompts at once. Runs in the engine's process."""
    scheduler = engine.scheduler
    preemptions, drafts = count_calls(scheduler, "_preempt_request"), count_drafts(scheduler)
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        {"temperature": 0.0, "max_tokens": MAX_TOKENS, "skip_special_tokens": False},
    )
    found = []
    for answer in answers:
        assert answer.record is not None
        statistics = answer.record.statistics
        found.append((answer.text, statistics.threads, statistics.joins))
    events = {"preempted": preemptions[0], "speculated": drafts[0]}
    return Run(found, {name for name, count in events.items() if count}, core_state(scheduler))


@pytest.mark.parametrize("way", WAYS)
def test_texts_equal_those_of_the_client(way: str) -> None:
    tokenizer, answers = client_answers()
    given, events = WAYS[way]
    arguments: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": 2048} | given
    if spare_blocks := arguments.pop("spare_blocks", None):
        # Behind the longest answer, a thread may speculate a few tokens.
        needed = max(len(answer.context) for answer in answers) // BLOCK_SIZE + 2
        arguments["max_model_len"] = needed * BLOCK_SIZE
        arguments["num_gpu_blocks_override"] = needed + spare_blocks
    engine = EngineProcess(model=str(checkpoint_path()), **arguments)
    try:
        run = engine.call(generate, [answer.prompt_ids for answer in answers])
    finally:
        engine.close()

    end = tokenizer.eos_token_id
    expected = [tokenizer.decode([i for i in each.text_ids if i != end]) for each in answers]
    assert [text for text, _, _ in run.answers] == expected
    # An answer ends at a thread that does not close itself, without another line break.
    joins = [text.count("</Thread>\n") for text in expected]
    threads = [1 + text.count("<Thread>") for text in expected]
    assert [number for _, number, _ in run.answers] == threads
    assert [number for _, _, number in run.answers] == joins
    assert sum(joins) > NUM_PROMPTS // 3
    assert max(joins) > 1
    assert run.events == events
    assert run.state["free_blocks"] == run.state["kv_blocks"]


@pytest.mark.cluster
def test_a_served_answer_equals_the_clients(tmp_path: Path) -> None:
    tokenizer, answers = client_answers()
    chosen = max(answers[:10], key=lambda answer: len(answer.prompts))
    model = {**TINY, "checkpoint": "apar-tiny-threadweaver"}
    with serving(tmp_path, model) as server:
        reply = server.post(
            "/v1/completions",
            json={
                "model": "apar-tiny-threadweaver",
                "prompt": chosen.prompt_ids,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "skip_special_tokens": False,
            },
        ).json()

    end = tokenizer.eos_token_id
    expected = tokenizer.decode([i for i in chosen.text_ids if i != end])
    assert reply["choices"][0]["text"] == expected
    assert reply["apar"]["threads"] == 1 + expected.count("<Thread>")
