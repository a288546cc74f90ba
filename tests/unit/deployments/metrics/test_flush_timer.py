"""Timer that records the state of a process."""

import asyncio

import pytest

from deployments.metrics.flush_timer import FlushTimer


async def test_a_failing_flush_is_logged_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_calls = 0
    works = asyncio.Event()

    async def flush() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 4:
            raise RuntimeError("no state")
        works.set()

    timer = FlushTimer(flush, period_s=0.001)
    await asyncio.wait_for(works.wait(), 60)
    await timer.close()

    assert [record.message for record in caplog.records] == ["metrics not recorded"]


async def test_the_last_flush_is_at_the_end() -> None:
    num_calls = 0

    async def flush() -> None:
        nonlocal num_calls
        num_calls += 1

    timer = FlushTimer(flush, period_s=60)
    await asyncio.sleep(0)
    await timer.close()
    await timer.close()

    assert num_calls >= 2
