"""Timer that records the state of a process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from deployments.metrics.node import write_changes

logger = logging.getLogger(__name__)

FLUSH_PERIOD_S = 1.0


class FlushTimer:
    """Owns the task that records the state of the process every `period_s`, by `flush`.

    Then it brings all counts to the page. A failing flush is logged once per run of failures, and
    tried again at the next period.
    """

    def __init__(
        self, flush: Callable[[], Awaitable[None]], *, period_s: float = FLUSH_PERIOD_S
    ) -> None:
        self._flush = flush
        self._period_s = period_s
        self._failing = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop after a last flush."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._flush_logged()

    async def _run(self) -> None:
        while True:
            await self._flush_logged()
            await asyncio.sleep(self._period_s)

    async def _flush_logged(self) -> None:
        try:
            await self._flush()
        except Exception as error:  # Metrics must not stop what they measure.
            if not self._failing:
                logger.warning("metrics not recorded", exc_info=error)
            self._failing = True
        else:
            self._failing = False
        write_changes()
