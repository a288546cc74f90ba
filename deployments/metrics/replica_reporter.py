"""A replica's metrics, our own and vLLM's, handed over as long as it lives."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.metrics.ray_instruments import RayInstruments
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.metrics.restarts import note_of_this_replica
from deployments.metrics.timer import FlushTimer
from deployments.metrics.vllm_stats import VllmStats

# The engine answers between two steps, of which one on a CPU may take seconds.
_STATE_S = 10.0


class ReplicaReporter:
    """Hands over what the replica counts, its engine core's state, and vLLM's numbers."""

    def __init__(self, *, model: str, replica: str) -> None:
        instruments = RayInstruments()
        self.metrics = ReplicaMetrics(instruments, model=model, replica=replica)
        self._vllm = VllmStats(instruments, replica)
        self._note = note_of_this_replica()
        self._timer: FlushTimer | None = None

    @property
    def stat_loggers(self) -> list[Any]:
        """What the engine is to be built with."""
        return [self._vllm.stat_logger]

    def begin(
        self, core_state: Callable[[], Awaitable[dict[str, Any]]], num_inside: Callable[[], int]
    ) -> None:
        """Tell of the engine and of the requests inside from now on."""

        self.metrics.started(replaces_lost=self._note.leave())

        async def flush() -> None:
            state = await asyncio.wait_for(core_state(), _STATE_S)
            self.metrics.flush(state, num_inside())
            self._vllm.flush()

        self._timer = FlushTimer(flush)

    async def close(self) -> None:
        """Hand everything over a last time; the engine must still answer."""
        if self._timer is not None:
            await self._timer.close()
            self._note.take_back()
