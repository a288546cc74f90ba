"""Forks in engines of several processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import CompilationMode
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from apar_core.engine.async_engine import AparAsyncLLM
from apar_core.engine.input_processor import ENABLED_ARG
from apar_core.errors import EngineError
from apar_core.models.apar_tiny import checkpoint_path
from apar_core.scheduler.core_state import CoreState
from deployments.replica.engine_factory import build_engine, server_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = [
    f"Give me {number} tips for {topic}."
    for number in (3, 5)
    for topic in ("learning guitar", "sleeping well", "saving water")
]
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "data": {"data_parallel_size": 2},
    # vLLM's pipeline stages on a CPU need a compiled model; this backend compiles nothing.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enforce_eager": False,
        "compilation_config": {"mode": CompilationMode.DYNAMO_TRACE_ONCE, "backend": "eager"},
    },
}
# The embedded model's prompts are short, so that blocks of 32 tokens have short prefixes.
FAMILY = {"apar": {"attention": "family", "family": {"min_prefix_blocks": 1}}}
WAYS["tensor, family attention"] = WAYS["tensor"] | {"additional_config": FAMILY}
NUM_RANKS = {"tensor": 1, "tensor, family attention": 1, "data": 2, "pipeline": 1}
FORKS_BEFORE_ABORT = 3
IDLE_S = 60.0


@asynccontextmanager
async def running(**arguments: Any) -> AsyncIterator[AparAsyncLLM]:
    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 768,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 64 << 20,
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        engine = build_engine(server_arguments(str(checkpoint_path()), "tiny", common | arguments))
        try:
            yield engine
        finally:
            engine.shutdown()


async def answer(
    engine: AparAsyncLLM, number: int, name: str, *, forks: bool = True
) -> tuple[str, int]:
    """Return the text of an answer and its number of forks."""
    tokenizer: Any = engine.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[number]}],
        add_generation_prompt=True,
        return_dict=False,
    )
    request_id, text = f"{name}-{number}-{forks}", ""
    params = SamplingParams(temperature=0.0, max_tokens=200, extra_args={ENABLED_ARG: forks})
    async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id):
        text = output.outputs[0].text
    record = engine.take_statistics(request_id)
    assert record is not None
    return text, record.statistics.forks


async def all_answers(engine: AparAsyncLLM, name: str) -> list[tuple[str, int]]:
    """Return the answers to all questions, with forks and then without."""
    ways = [(number, forks) for forks in (True, False) for number in range(len(QUESTIONS))]
    running = (answer(engine, number, name, forks=forks) for number, forks in ways)
    return list(await asyncio.gather(*running))


def num_forks(states: list[CoreState]) -> list[int]:
    return [state.fork_counters.forks for state in states]


def requests_of_client(engine: AparAsyncLLM) -> dict[str, bytes]:
    """Return the rank of each request that vLLM's client of several engines remembers."""
    core: Any = engine.engine_core
    return dict(core.reqs_in_flight) if isinstance(core, DPLBAsyncMPClient) else {}


async def idle_states(engine: AparAsyncLLM) -> list[CoreState]:
    """Wait until no rank and no client holds anything, and return the states."""
    async with asyncio.timeout(IDLE_S):
        while True:
            states = await engine.core_states()
            busy = any(each.threads or each.deferred_threads for each in states)
            if not busy and not requests_of_client(engine):
                return states
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, int]]:
    async def run() -> list[tuple[str, int]]:
        async with running() as engine:
            return await all_answers(engine, "alone")

    return asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
async def test_answers_are_those_of_one_process_and_aborts_leave_nothing(
    way: str, expected: list[tuple[str, int]]
) -> None:
    async with running(**WAYS[way]) as engine:
        found = await all_answers(engine, way)
        before = num_forks(await idle_states(engine))

        tasks = [asyncio.create_task(answer(engine, number, "cut")) for number in range(6)]
        async with asyncio.timeout(IDLE_S):
            while any(  # noqa: ASYNC110 - the engine core is asked, it reports nothing
                now < then + FORKS_BEFORE_ABORT
                for now, then in zip(num_forks(await engine.core_states()), before, strict=True)
            ):
                await asyncio.sleep(0.01)
        ranks = set(requests_of_client(engine).values())
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        states = await idle_states(engine)
        again = await answer(engine, 0, "again")
        counts = await engine.collective_rpc("family_counts") if "family" in way else []

    assert found == expected
    assert sum(forks for _, forks in found[:6]) >= 15
    assert [forks for _, forks in found[6:]] == [0] * 6
    assert again == expected[0]
    assert len(states) == NUM_RANKS[way]
    assert len(ranks) == (NUM_RANKS[way] if way == "data" else 0)
    assert sum(isinstance(end, asyncio.CancelledError) for end in ends) >= 2
    for state, then in zip(states, before, strict=True):
        assert state.free_blocks == state.kv_blocks > 0
        assert then > 0
    # Of each worker.
    assert len(counts) == (2 if "family" in way else 0)
    assert all(each["saved_blocks"] > 0 and each == counts[0] for each in counts)


async def test_a_pipeline_that_vllm_cannot_run_is_refused_before_it_starts() -> None:
    way = WAYS["pipeline"] | {"enforce_eager": True, "compilation_config": {}}

    with pytest.raises(EngineError, match="pipeline_parallel_size=2: without compilation"):
        async with running(**way):
            pass
