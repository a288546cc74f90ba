"""The shipped checkpoint that joins: the engine's texts equal those of a resubmitting client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.models.apar_tiny_threadweaver import checkpoint_path
from apar_core.offline.evaluation.fork_check import HeldOutSettings
from apar_core.offline.evaluation.join_check import (
    ResubmittingClient,
    check_joins,
)
from apar_core.scheduler.core_state import CoreState, core_state
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import count_calls, count_drafts
from tests.integration.serving.apar_process import TINY, serving

pytestmark = [pytest.mark.slow, pytest.mark.engine]

NUM_PROMPTS = 24
MAX_TOKENS = 1200
BLOCK_SIZE = 16
ADAPTER_SPREAD = 0.16
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
    _, answers = check_joins(HeldOutSettings(num_prompts=NUM_PROMPTS), client)
    return tokenizer, answers


@dataclass(frozen=True)
class Run:
    """Each answer's text, threads and joins; and what happened in the engine."""

    answers: list[tuple[str, int, int]]
    events: set[str]
    state: CoreState


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
    assert run.state.free_blocks == run.state.kv_blocks


def answer_with_adapter(
    engine: OfflineEngine, prompts: list[list[int]], adapter: str
) -> tuple[list[str], CoreState]:
    """Answer prompts with an adapter and without it, all at once. Runs in the engine's process."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    requests: list[Any] = [LoRARequest("adapter", 1, adapter), None]
    tokens: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(
        tokens * 2,
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, skip_special_tokens=False),
        lora_request=[request for request in requests for _ in prompts],
        use_tqdm=False,
    )
    return [output.outputs[0].text for output in outputs], core_state(engine.scheduler)


def write_adapter(folder: Path, model: Any) -> None:
    """Write a random adapter of the attention's projections, and add it to `model`."""
    rank, names = 4, ("q_proj", "v_proj")
    generator = torch.Generator().manual_seed(0)
    factors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        for name in names:
            weight = getattr(layer.self_attn, name).weight.data
            first, second = (
                ADAPTER_SPREAD * torch.randn(shape, generator=generator)
                for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))
            )
            weight += second @ first
            key = f"base_model.model.model.layers.{number}.self_attn.{name}"
            factors |= {f"{key}.lora_A.weight": first, f"{key}.lora_B.weight": second}
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_an_unmerged_adapter_joins_as_the_merged_model_beside_its_base(tmp_path: Path) -> None:
    tokenizer, answers = client_answers()
    answers = answers[:8]
    merged = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    write_adapter(tmp_path / "adapter", merged)
    prompts = [answer.prompt_ids for answer in answers]
    adapted = ResubmittingClient(merged, tokenizer, batch_size=1)(prompts)
    engine = EngineProcess(
        model=str(checkpoint_path()),
        max_model_len=2048,
        enable_lora=True,
        max_lora_rank=8,
    )
    try:
        texts, state = engine.call(answer_with_adapter, prompts, str(tmp_path / "adapter"))
    finally:
        engine.close()

    end = tokenizer.eos_token_id
    expected = [
        tokenizer.decode([i for i in each.text_ids if i != end]) for each in (*adapted, *answers)
    ]
    assert texts == expected
    joins = [text.count("</Thread>\n") for text in expected]
    assert sum(joins[: len(adapted)]) > 0
    assert expected[: len(adapted)] != expected[len(adapted) :]
    assert state.free_blocks == state.kv_blocks


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
