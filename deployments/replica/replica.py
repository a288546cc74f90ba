"""One engine and vLLM's HTTP application in one Ray Serve replica."""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import BaseModel, ConfigDict, NonNegativeFloat
from ray import serve
from starlette.types import ASGIApp

from cluster.config.logging import LoggingConfig
from cluster.config.tracing import TracingConfig
from cluster.logs import ProcessLogs
from deployments.app.autoscaling import replica_report
from deployments.replica.answering import Answering
from deployments.replica.apar_extension import AparExtension
from deployments.replica.engine_factory import kept_serve_logs
from deployments.tracing import REPLICA, close_tracing, open_tracing
from deployments.wire.load import ReplicaLoad

if TYPE_CHECKING:
    from apar_core.engine.async_engine import AparAsyncLLM

logger = logging.getLogger(__name__)


class ReplicaSettings(BaseModel):
    """What a replica serves and how it sends on its streams."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    served_name: str
    engine: dict[str, Any]
    coalesce_s: NonNegativeFloat
    logging: LoggingConfig = LoggingConfig()
    metrics: bool = True
    tracing: TracingConfig = TracingConfig()


class Replica(Answering):
    """Runs requests through vLLM's application in process; the gateway is its only caller."""

    _engine: "AparAsyncLLM"

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc] # Ray Serve awaits it.
        settings.tracing.read_headers()  # Fail before the engine is built.
        with kept_serve_logs():
            app = await self._build(settings)
        self._reporter = LoadReporter(self._engine.vllm_config.cache_config.block_size)
        super().__init__(self._engine, app, serve.get_replica_context().replica_id.unique_id)
        if self._told is not None:
            self.metrics = self._told.metrics
            self._told.begin(
                self._engine.core_state, lambda: self.num_inside, lambda: self._logs.num_dropped
            )
        self.tracing = open_tracing(settings.tracing, REPLICA)
        self._watchdog = asyncio.create_task(
            watch(lambda: self.engine_lost, at_last=partial(close_tracing, self.tracing, 1.0))
        )

    async def _build(self, settings: ReplicaSettings) -> ASGIApp:
        """The engine, and the application over it."""
        # vLLM takes seconds to import; the process that composes the application need not.
        from deployments.replica.engine_factory import (
            build_engine,
            build_http_application,
            server_arguments,
        )
        from deployments.replica.replica_metrics import ReplicaReporter

        name = settings.served_name.replace("/", "-")
        self._logs = ProcessLogs(settings.logging, f"replica-{name}")
        args = server_arguments(settings.model, settings.served_name, settings.engine)
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._told = (
            ReplicaReporter(model=settings.served_name, replica=replica_id)
            if settings.metrics
            else None
        )
        self._engine = build_engine(args, self._told.stat_loggers if self._told else ())
        self._engine.pace_streams(settings.coalesce_s)
        await self._engine.warm_up()
        tokens = self._engine.control_tokens
        return AparExtension(
            await build_http_application(self._engine, args),
            control_token_ids=frozenset(tokens.texts if tokens else ()),
            take_statistics=self._take_statistics,
        )

    def _take_statistics(self, request_id: str) -> Mapping[str, Any] | None:
        record = self._engine.take_statistics(request_id)
        return None if record is None else asdict(record.statistics)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers choose by; Ray Serve asks for it and hands it on to them."""
        state = await self._engine.core_state()
        return asdict(self._reporter.report(state, self.num_inside, time.time()))

    async def load(self) -> dict[str, Any]:
        """Requests and threads alive, KV blocks in all and free, at this moment.

        `requests_inside` counts what the HTTP side holds, the rest comes from the engine core.
        """
        return {"requests_inside": self._engine.get_num_unfinished_requests()} | (
            await self._engine.core_state()
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's autoscaling: what this replica carries."""
        return replica_report(await self._engine.core_state(), self.num_inside)

    async def __del__(self) -> None:
        self._watchdog.cancel()
        if self._told is not None:
            await self._told.close()
        self._engine.shutdown()
        await close_tracing(self.tracing)


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


# Rates are of the last so many seconds: long enough for a mean, short enough to follow a load.
WINDOW_S = 2.0
_FIELDS = frozenset(field.name for field in fields(ReplicaLoad))


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    num_steps: int
    num_rows: int
    busy_s: float


class LoadReporter:
    """Turns the engine core's counts into a report; rates come from the counts before."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._samples: deque[_Sample] = deque()

    def report(self, state: Mapping[str, Any], requests: int, now_s: float) -> ReplicaLoad:
        """The report for this moment, with so many requests inside the replica.

        `state` is the engine's `core_state`, whose own count of requests has each choice of an
        answer as one; what Ray Serve counts against a replica's cap is the calls.
        """
        steps = state.get("steps", {})
        sample = _Sample(
            now_s, steps.get("num_steps", 0), steps.get("num_rows", 0), steps.get("busy_s", 0.0)
        )
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()
        oldest = self._samples[0]
        busy_s = sample.busy_s - oldest.busy_s
        num_steps = sample.num_steps - oldest.num_steps
        return ReplicaLoad(
            requests=requests,
            threads=state["threads"],
            waiting_forks=state.get("deferred_threads", 0),
            blocks=state["kv_blocks"],
            free_blocks=state["free_blocks"],
            block_size=self._block_size,
            tokens_per_s=(sample.num_rows - oldest.num_rows) / busy_s if busy_s > 0 else 0.0,
            step_s=busy_s / num_steps if num_steps else 0.0,
            taken_at_s=now_s,
        )


def load_from(stats: Mapping[str, Any]) -> ReplicaLoad | None:
    """The report that arrived through Ray Serve; None for nothing, or of another version."""
    if stats.keys() != _FIELDS:
        return None
    return ReplicaLoad(**stats)
