"""The shipped checkpoint that joins: the engine's texts equal those of a resubmitting client."""

from __future__ import annotations

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
from tests.integration.engine_process import EngineProcess
from tests.integration.serving.apar_process import TINY, serving

pytestmark = [pytest.mark.slow, pytest.mark.engine]

NUM_PROMPTS = 24
MAX_TOKENS = 1200


def client_answers() -> tuple[PreTrainedTokenizerFast, list[Any]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_path())
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    # One prompt per batch: padding would change the last bits.
    client = ResubmittingClient(model, tokenizer, batch_size=1)
    _, answers = check_joins(JoinCheckSettings(num_prompts=NUM_PROMPTS), client)
    return tokenizer, answers


def generate(engine: OfflineEngine, prompts: list[list[int]]) -> list[tuple[str, int, int]]:
    """Return each answer's text, threads and joins."""
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        {"temperature": 0.0, "max_tokens": MAX_TOKENS, "skip_special_tokens": False},
    )
    found = []
    for answer in answers:
        assert answer.record is not None
        statistics = answer.record.statistics
        found.append((answer.text, statistics.threads, statistics.joins))
    return found


@pytest.mark.parametrize("block_size", [16, 32])
def test_texts_equal_those_of_the_client(block_size: int) -> None:
    tokenizer, answers = client_answers()
    engine = EngineProcess(model=str(checkpoint_path()), block_size=block_size, max_model_len=2048)
    try:
        found = engine.call(generate, [answer.prompt_ids for answer in answers])
    finally:
        engine.close()

    end = tokenizer.eos_token_id
    expected = [tokenizer.decode([i for i in each.text_ids if i != end]) for each in answers]
    assert [text for text, _, _ in found] == expected
    blocks = [text.count("</Outlines>") for text in expected]
    assert [number for _, number, _ in found] == [1 + text.count("<Thread>") for text in expected]
    assert [joins for _, _, joins in found] == blocks
    assert sum(blocks) > NUM_PROMPTS // 3
    assert max(blocks) > 1


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
