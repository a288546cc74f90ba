"""vLLM's pause and sleep in a running engine, with forked answers in flight."""

import asyncio
from typing import Any

import pytest
from vllm import SamplingParams

from apar_core.engine.async_engine import AparAsyncLLM
from tests.integration.features.test_parallel import (
    IDLE_S,
    QUESTIONS,
    all_answers,
    idle_states,
    running,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Ended = tuple[str, str | None]


async def ended(engine: AparAsyncLLM, number: int, name: str) -> Ended:
    """Return the text of an answer and its finish reason."""
    tokenizer: Any = engine.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[number]}],
        add_generation_prompt=True,
        return_dict=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=200)
    text, reason = "", None
    async for output in engine.generate({"prompt_token_ids": prompt}, params, f"{name}-{number}"):
        text, reason = output.outputs[0].text, output.outputs[0].finish_reason
    return text, reason


async def forking(engine: AparAsyncLLM, name: str) -> list[asyncio.Task[Ended]]:
    """Ask all questions, and wait until their answers have forked."""
    before = (await engine.core_state()).fork_counters.forks
    numbers = range(len(QUESTIONS))
    tasks = [asyncio.create_task(ended(engine, number, name)) for number in numbers]
    while (  # noqa: ASYNC110 - the engine core is asked, it reports nothing
        await engine.core_state()
    ).fork_counters.forks < before + len(tasks):
        await asyncio.sleep(0.01)
    assert not all(task.done() for task in tasks)
    return tasks


async def texts_of(tasks: list[asyncio.Task[Ended]]) -> list[str]:
    return [text for text, _ in await asyncio.gather(*tasks)]


async def test_no_request_is_lost_by_a_pause_or_a_sleep() -> None:
    async with running() as engine, asyncio.timeout(10 * IDLE_S):
        before = await all_answers(engine, "alone")
        expected = [text for text, _ in before[: len(QUESTIONS)]]  # with forks

        # Waits for the forked answers; a new request waits for the end of the pause.
        tasks = await forking(engine, "wait")
        await engine.pause_generation(mode="wait")
        late = asyncio.create_task(ended(engine, 0, "late"))
        assert await texts_of(tasks) == expected
        assert await engine.is_paused()
        assert not late.done()
        await engine.resume_generation()
        assert (await late)[0] == expected[0]

        # Freezes them and drops their KV.
        tasks = await forking(engine, "keep")
        await engine.pause_generation(mode="keep")
        state = await engine.core_state()
        assert state.free_blocks == state.kv_blocks
        assert state.threads > 0
        await engine.resume_generation()
        assert await texts_of(tasks) == expected

        tasks = await forking(engine, "abort")
        await engine.pause_generation(mode="abort")
        reasons = {reason for _, reason in await asyncio.gather(*tasks)}
        assert "abort" in reasons
        assert reasons <= {"abort", "stop"}
        await engine.resume_generation()

        # vLLM's CPU workers keep weights and memory, and only the scheduler sleeps.
        tasks = await forking(engine, "sleep")
        await engine.sleep(level=1, mode="keep")
        assert await engine.is_sleeping()
        assert not all(task.done() for task in tasks)
        assert await engine.wake_up()
        assert await texts_of(tasks) == expected

        tasks = await forking(engine, "sleep-abort")
        await engine.sleep(level=1)
        assert "abort" in {reason for _, reason in await asyncio.gather(*tasks)}
        await engine.wake_up()
        assert await all_answers(engine, "after") == before
        (state,) = await idle_states(engine)
        assert state.free_blocks == state.kv_blocks
