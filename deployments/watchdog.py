"""Ends a replica whose engine has died, so that Ray Serve replaces it within seconds."""

import asyncio
import logging
import os
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
# Long enough for the streams in flight to hand on their error events.
LAST_WORDS_S = 0.5
EXIT_STATUS = 70


async def watch(
    is_dead: Callable[[], bool],
    *,
    end_process: Callable[[int], None] = os._exit,
    period_s: float = PERIOD_S,
    last_words_s: float = LAST_WORDS_S,
) -> None:
    """Poll the engine until it is dead, then end the process.

    A failed health check alone would leave the replica answering errors for seconds; it ends
    hard because Ray Serve's own teardown waits for requests that cannot finish.
    """
    while not is_dead():  # noqa: ASYNC110 - the engine sets a flag when it dies, no event
        await asyncio.sleep(period_s)
    logger.error("engine died; ending the replica")
    await asyncio.sleep(last_words_s)
    end_process(EXIT_STATUS)
