"""A replica's metrics, our own and vLLM's, handed over as long as it lives."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.metrics.ray_instruments import RayInstruments
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.metrics.restarts import note_of_this_replica
from deployments.metrics.timer import FlushTimer
from deployments.metrics.vllm_stats import VllmStats

# The engine answers between two steps, of which one on a CPU may take seconds. Ray forgets a
# gauge within a few, so the last answer is told again meanwhile; an old one would hide a failure.
_PATIENCE_S = 0.5
_TOLD_AGAIN_S = 10.0


class LastState:
    """What the engine core last said of its state."""

    def __init__(
        self,
        core_state: Callable[[], Awaitable[dict[str, Any]]],
        *,
        patience_s: float = _PATIENCE_S,
        told_again_s: float = _TOLD_AGAIN_S,
    ) -> None:
        self._core_state = core_state
        self._patience_s = patience_s
        self._told_again_s = told_again_s
        self._asked: asyncio.Future[dict[str, Any]] | None = None
        self._state: dict[str, Any] | None = None
        self._came_s = time.monotonic()

    async def get(self) -> dict[str, Any] | None:
        """The state of now, or the last one; None where that is too old. Raises as asking does."""
        asked = self._asked or asyncio.ensure_future(self._core_state())
        self._asked = asked
        await asyncio.wait([asked], timeout=self._patience_s)
        now_s = time.monotonic()
        if asked.done():
            self._asked, self._state = None, None
            self._state, self._came_s = asked.result(), now_s
        elif now_s - self._came_s > self._told_again_s:
            self._state = None
        return self._state

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._asked is not None:
            self._asked.cancel()


class ReplicaReporter:
    """Hands over what the replica counts, its engine core's state, and vLLM's numbers."""

    def __init__(self, *, model: str, replica: str) -> None:
        instruments = RayInstruments()
        self.metrics = ReplicaMetrics(instruments, model=model, replica=replica)
        self._vllm = VllmStats(instruments, replica)
        self._note = note_of_this_replica()
        self._timer: FlushTimer | None = None
        self._state: LastState | None = None

    @property
    def stat_loggers(self) -> list[Any]:
        """What the engine is to be built with."""
        return [self._vllm.stat_logger]

    def begin(
        self,
        core_state: Callable[[], Awaitable[dict[str, Any]]],
        num_inside: Callable[[], int],
        log_lines_dropped: Callable[[], int],
    ) -> None:
        """Tell of the engine, of the requests inside and of the log from now on."""

        self.metrics.started(replaces_lost=self._note.leave())
        last = self._state = LastState(core_state)

        async def flush() -> None:
            try:
                self.metrics.log_lines_dropped(log_lines_dropped())
                self.metrics.flush(await last.get(), num_inside())
            finally:
                self._vllm.flush()

        self._timer = FlushTimer(flush)

    async def close(self) -> None:
        """Hand everything over a last time; the engine must still answer."""
        if self._timer is not None and self._state is not None:
            await self._timer.close()
            self._state.close()
            self._note.take_back()
