"""Hands a process's numbers over once a second, and a last time at its end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class FlushTimer:
    """Owns the task that calls `flush` every `period_s` in the running event loop.

    A flush that fails is logged, once for each run of failures, and the next one comes in time.
    """

    def __init__(self, flush: Callable[[], Awaitable[None]], *, period_s: float = PERIOD_S) -> None:
        self._flush = flush
        self._period_s = period_s
        self._failing = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, after a last flush."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._flush_logged()

    def stop(self) -> None:
        """Stop without a last flush, where nobody may wait for it."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await self._flush_logged()
            await asyncio.sleep(self._period_s)

    async def _flush_logged(self) -> None:
        try:
            await self._flush()
        except Exception as error:  # metrics must not end what they tell of
            if not self._failing:
                logger.warning("metrics not handed over", exc_info=error)
            self._failing = True
        else:
            self._failing = False
