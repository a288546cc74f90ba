"""The timer that hands numbers over, and what becomes of a failure."""

import asyncio
import logging

import pytest

from deployments.metrics.recorder import FlushTimer


async def test_it_flushes_at_once_again_and_a_last_time() -> None:
    num_flushes = 0

    async def flush() -> None:
        nonlocal num_flushes
        num_flushes += 1

    timer = FlushTimer(flush, period_s=0.01)
    await asyncio.sleep(0.1)
    before = num_flushes
    await timer.close()
    after = num_flushes
    await asyncio.sleep(0.05)

    assert before >= 2
    assert after == num_flushes == before + 1


async def test_a_failure_is_logged_once_and_the_next_flush_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fails = True
    num_flushes = 0

    async def flush() -> None:
        nonlocal num_flushes
        num_flushes += 1
        if fails:
            raise TimeoutError("the engine does not answer")

    with caplog.at_level(logging.WARNING):
        timer = FlushTimer(flush, period_s=0.01)
        await asyncio.sleep(0.1)
        fails = False
        await asyncio.sleep(0.05)
        await timer.close()

    assert num_flushes > 3
    assert [record.message for record in caplog.records] == ["metrics not handed over"]
