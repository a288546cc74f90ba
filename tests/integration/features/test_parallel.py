"""Forks in engines of several processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from vllm import SamplingParams

from apar_core.engine.async_engine import AparAsyncLLM
from apar_core.models.apar_tiny import checkpoint_path
from deployments.replica.engine_factory import build_engine, server_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = [
    f"Give me {number} tips for {topic}."
    for number in (3, 5)
    for topic in ("learning guitar", "sleeping well", "saving water")
]
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}
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


async def answer(engine: AparAsyncLLM, number: int, name: str) -> tuple[str, int]:
    """Return the text of an answer and its number of forks."""
    tokenizer: Any = engine.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[number]}],
        add_generation_prompt=True,
        return_dict=False,
    )
    request_id, text = f"{name}-{number}", ""
    params = SamplingParams(temperature=0.0, max_tokens=200)
    async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id):
        text = output.outputs[0].text
    record = engine.take_statistics(request_id)
    assert record is not None
    return text, record.statistics.forks


async def all_answers(engine: AparAsyncLLM, name: str) -> list[tuple[str, int]]:
    numbers = range(len(QUESTIONS))
    return list(await asyncio.gather(*(answer(engine, number, name) for number in numbers)))


async def idle_states(engine: AparAsyncLLM) -> list[dict[str, Any]]:
    """Wait until no rank holds anything, and return the states."""
    async with asyncio.timeout(IDLE_S):
        while True:
            states = await engine.core_states()
            if not any(each["threads"] or each["deferred_threads"] for each in states):
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
        forks_before = (await engine.core_state())["fork_counters"]["forks"]

        tasks = [asyncio.create_task(answer(engine, number, "cut")) for number in range(6)]
        async with asyncio.timeout(IDLE_S):
            while (  # noqa: ASYNC110 - the engine core is asked, it reports nothing
                await engine.core_state()
            )["fork_counters"]["forks"] < forks_before + 6:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        states = await idle_states(engine)

    assert found == expected
    assert sum(forks for _, forks in found) >= 15
    for state in states:
        assert state["free_blocks"] == state["kv_blocks"] > 0
        assert state["fork_counters"]["forks"] > 0
