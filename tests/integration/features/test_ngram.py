"""Sampling parameters hold for drafts of vLLM's n-gram speculation on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.scheduler.core_state import core_state
from tests.integration.engine_process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.ci]

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
MESSAGE = "Give me five tips for learning guitar."


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(speculative_config=SPECULATION)
    yield process
    process.close()


def ask(engine: OfflineEngine, parameters: list[dict[str, Any]]) -> Any:
    """Answer one question with each set of sampling parameters; return tokens and free blocks."""
    prompt = engine.chat_prompt(MESSAGE)
    answers = engine.generate(
        [prompt] * len(parameters), [{"max_tokens": 60, **each} for each in parameters]
    )
    state = core_state(engine.scheduler)
    return [answer.token_ids for answer in answers], state.kv_blocks - state.free_blocks


@pytest.mark.parametrize("parameters", [{"top_k": 2}, {"top_k": 2, "top_p": 0.9}, {"top_p": 0.5}])
def test_a_request_alone_is_sampled(engine: EngineProcess, parameters: dict[str, Any]) -> None:
    found, used_blocks = engine.call(ask, [{"temperature": 1.0, **parameters}])

    assert len(found[0]) > 10
    assert used_blocks == 0


def test_sampling_with_one_choice_is_greedy_beside_requests_with_more(
    engine: EngineProcess,
) -> None:
    hot = [{"temperature": 2.0, "seed": seed} for seed in range(4)]
    one_choice = [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-3},
        {"temperature": 1e-3},
    ]

    found, used_blocks = engine.call(ask, [{"temperature": 0.0}, *one_choice * 3, *hot])

    greedy, *others = found
    assert others[:9] == [greedy] * 9
    assert greedy not in others[9:]
    assert used_blocks == 0
