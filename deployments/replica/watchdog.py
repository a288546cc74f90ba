"""Ends a replica whose engine has died or hangs, so that Ray Serve replaces it within seconds."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
# Long enough for the streams in flight to hand on their error events.
LAST_WORDS_S = 0.5
EXIT_STATUS = 70


def end_with_children(status: int) -> None:
    """End this process, and first those it has started: an engine that hangs does not follow."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(status)


async def watch(
    is_dead: Callable[[], bool],
    *,
    end_process: Callable[[int], None] = end_with_children,
    period_s: float = PERIOD_S,
    last_words_s: float = LAST_WORDS_S,
    at_last: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Poll the engine until it is dead, then end the process.

    A failed health check alone would leave the replica answering errors for seconds; it ends
    hard because Ray Serve's own teardown waits for requests that cannot finish. `at_last` runs
    just before, and must not take long.
    """
    while not is_dead():  # noqa: ASYNC110 - the engine sets a flag when it dies, no event
        await asyncio.sleep(period_s)
    logger.error("engine lost; ending the replica")
    await asyncio.sleep(last_words_s)
    if at_last is not None:
        await at_last()
    end_process(EXIT_STATUS)
