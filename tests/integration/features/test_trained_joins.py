"""`apar train --format threadweaver`: what a model has learned by heart, the engine writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.data.joined import joined_answer
from apar_core.offline.data.records import ExampleRecord, count_forks, flat_text
from apar_core.offline.data.tiny_corpus.generator import Corpus
from apar_core.offline.training.example_encoder import prompt_token_ids
from apar_core.offline.training.fine_tune import fine_tune
from apar_core.offline.training.recipe import Schedule, TrainingRecipe
from apar_core.scheduler.core_state import CoreState, core_state
from tests.fakes.example_files import write_examples
from tests.integration.engine_process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_EXAMPLES = 3
RECIPE = TrainingRecipe(
    batch_size=NUM_EXAMPLES, micro_batch_size=NUM_EXAMPLES, num_steps=24, learning_rate=3e-3,
    adam_betas=(0.9, 0.95), schedule=Schedule(shape="linear", warmup_share=0.1, decay_share=0.6),
    dtype="float32", context_length=1024, structured_share=1.0, validation_share=0.0,
    vocabulary_multiple=8,
)  # fmt: skip


def short_lists() -> list[ExampleRecord]:
    lists = [
        replace(example, example_id=str(number))
        for number, example in enumerate(Corpus(3).examples(200))
        if example.kind == "numbered"
        and not example.raw_prompt
        and count_forks(example.answer) == NUM_EXAMPLES
    ]
    return sorted(lists, key=lambda each: len(flat_text(each.answer)))[:NUM_EXAMPLES]


def generate(
    engine: OfflineEngine, prompts: list[list[int]]
) -> tuple[list[tuple[str, str, int, int]], CoreState]:
    """Answer prompts at once. Runs in the engine's process."""
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        {"temperature": 0.0, "max_tokens": 600, "skip_special_tokens": False},
    )
    found = []
    for answer in answers:
        assert answer.record is not None
        statistics = answer.record.statistics
        found.append((answer.text, answer.finish_reason, statistics.threads, statistics.joins))
    return found, core_state(engine.scheduler)


def test_a_trained_checkpoint_opens_and_joins_blocks_in_the_engine(tmp_path: Path) -> None:
    examples = short_lists()
    (tmp_path / "data").mkdir()
    write_examples(tmp_path / "data" / "structured.jsonl", examples)
    fine_tune(
        str(checkpoint_path()), tmp_path / "data", tmp_path / "out", RECIPE,
        format_name="threadweaver",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    engine = EngineProcess(model=str(tmp_path / "out"), max_model_len=1024)
    try:
        prompts = [prompt_token_ids(example, tokenizer) for example in examples]
        answers, state = engine.call(generate, prompts)
    finally:
        engine.close()

    assert answers == [
        (joined_answer(example.answer).text, "stop", 1 + NUM_EXAMPLES, 1) for example in examples
    ]
    assert state.free_blocks == state.kv_blocks
