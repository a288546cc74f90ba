"""The decoders generate the same threads as vLLM's forking engine in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.formats.control_tokens import find_control_tokens
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_HEADS
from apar_core.offline.decoders.interface import DecodedAnswer, DecodeLimits, decode_answer
from apar_core.offline.decoders.load import load_decoder, load_tokenizer
from apar_core.offline.speculation.medusa_heads import load_medusa_heads, save_medusa_heads
from apar_core.tree.threads import thread_prefix, thread_texts
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import Run, chats, generate_threads

pytestmark = pytest.mark.engine

NUM_CHATS = 12
# More than any answer has: a budget of all threads would cut speculating ones elsewhere.
MAX_TOKENS = 600

# Sequence that the thread continues (prompt, ancestors' text and control tokens), and what it adds.
Threads = list[tuple[tuple[int, ...], tuple[int, ...]]]


@cache
def tokenizer() -> Any:
    return load_tokenizer(checkpoint_path())


def prompts() -> list[list[int]]:
    return [
        tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats(NUM_CHATS)
    ]


def decoded(name: str) -> list[DecodedAnswer]:
    heads = SHIPPED_HEADS["apar-tiny"] if name == "medusa_apar" else None
    decoder = load_decoder(
        name, checkpoint_path(), medusa_heads=heads, device="cpu", dtype=torch.float32
    )
    limits = DecodeLimits(max_tokens=MAX_TOKENS)
    return [decode_answer(decoder, prompt, limits=limits) for prompt in prompts()]


def threads_of_decoder(name: str) -> Threads:
    return sorted(
        thread
        for prompt, answer in zip(prompts(), decoded(name), strict=True)
        for thread in threads_of_answer(prompt, answer)
    )


def threads_of_answer(prompt: list[int], answer: DecodedAnswer) -> Threads:
    control = find_control_tokens(tokenizer().get_vocab())
    assert control is not None
    texts = thread_texts(answer.tree)
    return [
        (
            tuple(thread_prefix(texts, thread, prompt, control.fork_id, control.child_id)),
            tuple(text.generated(control.fork_id, tokenizer().eos_token_id)),
        )
        for thread, text in texts.items()
    ]


def threads_of_run(run: Run) -> Threads:
    return sorted((thread.prefix, thread.generated) for thread in run.threads)


def plain_texts(engine: OfflineEngine, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Generate without forks. Runs in the engine's process."""
    answers = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompt_ids],
        {"temperature": 0.0, "max_tokens": MAX_TOKENS, "extra_args": {"apar_enabled": False}},
    )
    return [list(answer.token_ids) for answer in answers]


@dataclass(frozen=True)
class EngineAnswers:
    """What the engine generates with forks, and without."""

    run: Run
    plain: list[list[int]]


def run_engine(**engine_args: Any) -> EngineAnswers:
    engine = EngineProcess(**engine_args)
    try:
        return EngineAnswers(
            engine.call(generate_threads, chats(NUM_CHATS), MAX_TOKENS),
            engine.call(plain_texts, prompts()),
        )
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine_answers() -> EngineAnswers:
    return run_engine()


@pytest.mark.ci
@pytest.mark.parametrize("name", ["vanilla_apar", "medusa_apar"])
def test_a_forking_decoder_generates_the_threads_of_the_engine(
    name: str, engine_answers: EngineAnswers
) -> None:
    found = threads_of_decoder(name)

    assert len(found) > 2 * NUM_CHATS
    assert len({prefix for prefix, _ in found}) == len(found)
    assert found == threads_of_run(engine_answers.run)


def test_plain_generates_what_the_engine_does_without_forks(engine_answers: EngineAnswers) -> None:
    found = [answer.text_ids for answer in decoded("plain")]

    end_id = tokenizer().eos_token_id
    assert found == [
        [token for token in token_ids if token != end_id] for token_ids in engine_answers.plain
    ]


@pytest.mark.ci
def test_vllms_medusa_method_takes_the_shipped_heads_and_forks_as_without(
    tmp_path: Path, engine_answers: EngineAnswers
) -> None:
    # vLLM runs the heads in the dtype of their file, which has to be the model's.
    save_medusa_heads(load_medusa_heads(SHIPPED_HEADS["apar-tiny"]).float(), tmp_path)

    speculating = run_engine(
        speculative_config={"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 2}
    )

    run = speculating.run

    assert run.num_draft_tokens > 0
    assert threads_of_run(run) == threads_of_run(engine_answers.run)
    assert speculating.plain == engine_answers.plain
    assert run.state_after.threads == 0
    assert run.state_after.free_blocks == run.state_after.kv_blocks


@pytest.mark.slow
def test_vllms_medusa_method_takes_the_folder_of_the_shipped_heads_as_it_is() -> None:
    run = run_engine(
        dtype="bfloat16",
        speculative_config={
            "method": "medusa",
            "model": str(SHIPPED_HEADS["apar-tiny"]),
            "num_speculative_tokens": 2,
        },
    ).run

    assert run.num_draft_tokens > 0
    assert any(thread.is_child for thread in run.threads)
    assert run.state_after.threads == 0
