"""Streaming-input sessions: prompts that come in parts, each answered before the next."""

from copy import deepcopy
from typing import Any

import pytest

from apar_core.engine.offline_engine import OfflineEngine
from apar_core.scheduler.core_state import CoreState, core_state
from apar_core.tree.statistics import TreeStatistics
from tests.integration.engine_process import EngineProcess
from tests.integration.sampling.asking import encode

pytestmark = pytest.mark.engine

PARTS = ("Give me tips", " for sleeping", " well.")
MAX_TOKENS = 5


def hold_session(
    engine: OfflineEngine, parts: list[list[int]]
) -> tuple[list[list[int]], TreeStatistics, CoreState]:
    """What is generated behind each part; runs in the engine, as AsyncLLM runs a session."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm: Any = engine.llm.llm_engine
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )

    def processed(request_id: str, token_ids: list[int], **session: Any) -> Any:
        prompt = {"prompt_token_ids": token_ids}
        return llm.input_processor.process_inputs(
            request_id, prompt, params, ("generate",), **session
        )

    def add(request: Any) -> None:
        # Two processes would have an object each.
        llm.output_processor.add_request(request, None)
        llm.engine_core.add_request(deepcopy(request))

    end = processed("session", [0])
    llm.input_processor.assign_request_id(end)
    answers: list[list[int]] = []
    for part in parts:
        request = processed(end.request_id, part, resumable=True)
        request.external_req_id = "session"
        add(request)
        answers.append([])
        while len(answers[-1]) < MAX_TOKENS:
            for output in llm.step():
                answers[-1] += output.outputs[0].token_ids
    add(end)
    while llm.has_unfinished_requests():
        llm.step()
    record = llm.output_processor.records.take("session")
    return answers, record.statistics, core_state(engine.scheduler)


def test_a_session_is_answered_part_by_part_and_counted_once(engine: EngineProcess) -> None:
    answers, statistics, state = engine.call(hold_session, [list(encode(part)) for part in PARTS])

    assert [len(answer) for answer in answers] == [MAX_TOKENS] * len(PARTS)
    assert (statistics.threads, statistics.forks) == (1, 0)
    assert statistics.text_tokens == MAX_TOKENS * len(PARTS)
    assert (state.threads, state.free_blocks) == (0, state.kv_blocks)
