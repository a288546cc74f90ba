"""A chain of prompt tokens in vLLM: what it guesses, accepts and leaves behind.

`test_equality.py` compares its threads with plain decoding under scarce memory and chunked prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.sampling_params import StructuredOutputsParams

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.engine.prompt_chain import PROPOSER
from apar_core.formats.prompt_file import read_prompt_file
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.models.guesses import SHIPPED_PROMPTS
from apar_core.scheduler.core_state import core_state
from tests.integration.engine_process import EngineProcess
from tests.integration.plain_decoding import (
    FLOAT_NOISE,
    GeneratedThread,
    chats,
    generate_threads,
    mismatches,
)

pytestmark = pytest.mark.engine

NUM_DRAFTS = 3
NUM_CHATS = 12
CHAIN: dict[str, Any] = {
    "speculative_config": {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": NUM_DRAFTS,
    },
    "additional_config": {"apar": {"prompt_tokens": str(SHIPPED_PROMPTS["apar-tiny"])}},
}


@dataclass
class Drafts:
    """Drafts of an engine: (tokens before it, drafted tokens), and their outcome.

    `outcomes` counts the rows by (guesses, accepted guesses).
    """

    proposed: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(**CHAIN)
    yield process
    process.close()


def proposer(engine: OfflineEngine) -> Any:
    core: Any = engine.llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner.drafter


def watch(engine: OfflineEngine) -> Drafts:
    """Note all drafts from now on, and what becomes of them."""
    drafts, chain, scheduler = Drafts(), proposer(engine), engine.scheduler
    propose, update = type(chain).propose, type(scheduler).update_from_output

    def noted(sampled: Any, num_tokens: Any, token_ids: Any, slot_mappings: Any = None) -> Any:
        found = propose(chain, sampled, num_tokens, token_ids)
        for row, draft in enumerate(found):
            if draft:
                before = tuple(token_ids[row, : num_tokens[row]].tolist())
                drafts.proposed.append((before, tuple(draft)))
        return found

    def counted(step: Any, output: Any) -> Any:
        for request_id, tokens in step.scheduled_spec_decode_tokens.items():
            guesses = sum(token_id < chain.first_id for token_id in tokens)
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            if sampled:
                drafts.outcomes[guesses, len(sampled) - 1] += 1
        return update(scheduler, step, output)

    chain.propose, scheduler.update_from_output = noted, counted
    return drafts


def answer_and_watch(engine: OfflineEngine, messages: Any) -> tuple[Any, Drafts]:
    drafts = watch(engine)
    # So many tokens that no answer is cut: where depends on the threads' speed.
    return generate_threads(engine, messages, 640), drafts


def with_scripted_guesses(
    engine: OfflineEngine, messages: Any, threads: Sequence[GeneratedThread]
) -> tuple[Any, Drafts]:
    """Answer again, with guesses that are right in two of three drafts, or wrong at the end."""
    script: dict[tuple[int, ...], tuple[int, ...]] = {}
    for thread in threads:
        for position in range(len(thread.generated)):
            before = (*thread.prefix, *thread.generated[:position])
            script[before] = thread.generated[position : position + NUM_DRAFTS - 1]
    chain = proposer(engine)
    original = type(chain).propose

    def scripted(
        self: Any, sampled: Any, num_tokens: Any, token_ids: Any, slots: Any = None
    ) -> Any:
        found = original(self, sampled, num_tokens, token_ids)
        for row, draft in enumerate(found):
            guesses = list(script.get(tuple(token_ids[row, : num_tokens[row]].tolist()), ()))
            if draft and guesses:
                if num_tokens[row] % 3 == 0:
                    guesses[-1] = 0
                prompts = range(self.first_id, self.first_id + NUM_DRAFTS - len(guesses))
                found[row] = [*guesses, *prompts]
        return found

    # The watch calls the class's method.
    type(chain).propose = scripted
    try:
        return answer_and_watch(engine, messages)
    finally:
        type(chain).propose = original


def predicted_guesses(before: Sequence[int], rows_MD: torch.Tensor, model: Any) -> torch.Tensor:
    """Logits [M, V] at the prompt tokens behind a prefix, computed with transformers."""
    embeddings = model.get_input_embeddings()(torch.tensor(before))
    with torch.no_grad():
        inputs = torch.cat([embeddings, rows_MD])[None]
        logits: torch.Tensor = model(inputs_embeds=inputs).logits
    return logits[0, len(before) :]


@pytest.mark.ci
def test_threads_equal_plain_decoding_and_guesses_those_of_the_prompt_tokens(
    engine: EngineProcess,
) -> None:
    run, drafts = engine.call(answer_and_watch, chats(NUM_CHATS))

    assert all(each.gap < FLOAT_NOISE for each in mismatches(run.threads))
    assert sum(thread.is_child for thread in run.threads) > NUM_CHATS
    assert run.state_after.free_blocks == run.state_after.kv_blocks
    # Real guesses: accepted one at a time and both at once, and refused.
    assert drafts.outcomes[2, 2] > 0
    assert drafts.outcomes[2, 1] > 0
    assert drafts.outcomes[2, 0] > drafts.outcomes[2, 1]
    # A guess is what its prompt token predicts behind the tokens before the last one.
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    rows_MD = read_prompt_file(SHIPPED_PROMPTS["apar-tiny"])[1][:, 0].float()
    size = model.config.vocab_size
    with_guesses = [each for each in drafts.proposed if each[1][0] < size]
    assert len(with_guesses) > 100
    for before, draft in with_guesses[::7]:
        guesses = [token_id for token_id in draft if token_id < size]
        logits_MV = predicted_guesses(before[:-1], rows_MD, model)
        for distance, token_id in enumerate(guesses):
            gap = logits_MV[distance].max() - logits_MV[distance, token_id]
            assert gap < FLOAT_NOISE
        assert draft[len(guesses) :] == tuple(range(size, size + NUM_DRAFTS - len(guesses)))


def test_scripted_guesses_are_accepted_through_forks_without_changing_a_thread(
    engine: EngineProcess,
) -> None:
    messages = chats(NUM_CHATS)
    plain, _ = engine.call(answer_and_watch, messages)

    fast, drafts = engine.call(with_scripted_guesses, messages, plain.threads)

    assert set(fast.threads) == set(plain.threads)
    accepted = sum(right * rows for (_, right), rows in drafts.outcomes.items())
    tokens = sum(len(thread.generated) for thread in fast.threads)
    # Two of three chains of two guesses are right, and one has one right guess.
    assert accepted > 0.5 * tokens
    assert drafts.outcomes[2, 2] > drafts.outcomes[2, 1] > 0
    assert fast.state_after.free_blocks == fast.state_after.kv_blocks
    assert fast.state_after.threads == 0


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.01, "seed": 1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 2.0, "seed": 2},
    {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "allowed_token_ids": list(range(40, 900))},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0.0, "bad_words": ["the"]},
    {"temperature": 0.0, "extra_args": {"apar_enabled": 0}},
]


def answers_with(engine: OfflineEngine, message: str, parameters: list[dict[str, Any]]) -> Any:
    """Answer one question with each set of sampling parameters; return tokens and state."""
    answers = engine.generate([engine.chat_prompt(message)] * len(parameters), parameters)
    return [answer.token_ids for answer in answers], core_state(engine.scheduler)


@pytest.mark.ci
def test_sampling_parameters_of_a_mixed_batch_hold_for_guesses(engine: EngineProcess) -> None:
    parameters = [{**each, "max_tokens": 60} for each in PARAMETERS]

    found, state = engine.call(answers_with, "Give me five tips for learning guitar.", parameters)

    greedy, *alike = found[:4]
    assert len(greedy) > 40
    # Sampled, but with nothing to choose from.
    assert alike == [greedy] * 3
    assert found[4] != greedy
    assert set(found[6]) <= set(range(40, 900))
    assert all(0 <= token_id < 4096 for token_ids in found for token_id in token_ids)
    assert state.free_blocks == state.kv_blocks


@pytest.mark.parametrize("parameters", [{"top_k": 2}, {"top_p": 0.5}, {"logprobs": 2}, {}])
def test_a_request_alone_is_sampled_with_and_without_guesses(
    engine: EngineProcess, parameters: dict[str, Any]
) -> None:
    chosen = [{"temperature": 1.0, "max_tokens": 24, **parameters}]

    found, state = engine.call(answers_with, "Give me two tips for learning guitar.", chosen)

    assert len(found[0]) > 10
    assert state.free_blocks == state.kv_blocks


def test_structured_output_is_written_beside_a_chain(engine: EngineProcess) -> None:
    assert engine.call(choose, ["yes", "no"]) in {"yes", "no"}


def choose(engine: OfflineEngine, choices: list[str]) -> str:
    structured = StructuredOutputsParams(choice=choices)
    parameters = {"temperature": 0.0, "structured_outputs": structured, "max_tokens": 20}
    (answer,) = engine.generate([engine.chat_prompt("Is water wet?")], [parameters])
    return answer.text
