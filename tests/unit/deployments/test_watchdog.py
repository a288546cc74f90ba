import asyncio

from deployments.watchdog import EXIT_STATUS, watch


async def test_the_process_ends_once_the_engine_is_dead_and_not_before() -> None:
    dead = False
    ended: list[int] = []
    task = asyncio.create_task(
        watch(lambda: dead, end_process=ended.append, period_s=0.001, last_words_s=0.02)
    )
    await asyncio.sleep(0.01)
    assert not task.done()

    dead = True
    await asyncio.sleep(0.01)
    assert ended == []  # the streams in flight hand on their error events
    await task

    assert ended == [EXIT_STATUS]
