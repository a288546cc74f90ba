"""One engine and vLLM's HTTP application in one Ray Serve replica."""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Any

import psutil
import ray
from pydantic import BaseModel, ConfigDict, NonNegativeFloat
from ray import serve
from starlette.types import ASGIApp

from deployments.autoscaling import ReplicaReport
from deployments.config.logging import LoggingConfig
from deployments.config.tracing import TracingConfig
from deployments.logs import ProcessLogs
from deployments.metrics.node import ProcessMetrics
from deployments.replica.answering import Answering
from deployments.replica.apar_extension import AparExtension
from deployments.replica.listener import Listener
from deployments.replica.replica_metrics import ReplicaMetrics, ReplicaReporter
from deployments.replica.start_failure import start_error
from deployments.tracing.tracing import REPLICA, close_tracing, open_tracing
from deployments.wire.load import ReplicaLoad
from deployments.wire.start import STAGES_FILE, GcsStore, Stage, StartReporter

if TYPE_CHECKING:
    from apar_core.engine.async_engine import AparAsyncLLM
    from apar_core.scheduler.core_state import CoreState

logger = logging.getLogger(__name__)

# Window of the rates in a load report: long enough for a mean, short enough to follow the load.
WINDOW_S = 2.0
WATCHDOG_PERIOD_S = 0.2
# Long enough for running streams to send their error events.
LAST_WORDS_S = 0.5
EXIT_STATUS = 70


class ReplicaSettings(BaseModel):
    """Settings of a replica: its model, its engine arguments, and how it paces streams.

    `metrics_port` is that of its node's page, None if another program serves it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    served_name: str
    engine: dict[str, Any]
    coalesce_s: NonNegativeFloat
    logging: LoggingConfig = LoggingConfig()
    metrics: bool = True
    metrics_port: int | None = None
    tracing: TracingConfig = TracingConfig()


class Replica(Answering):
    """Ray Serve replica that runs requests through vLLM's application; called by the gateway."""

    _engine: "AparAsyncLLM"

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc] # Ray Serve awaits it.
        settings.tracing.read_headers()  # Fail before the engine is built.
        context = serve.get_replica_context()
        replica_id, deployment = context.replica_id.unique_id, context.deployment
        reporter = StartReporter(deployment, replica_id, GcsStore())
        # Inherited by the engine's processes.
        os.environ[STAGES_FILE] = str(reporter.file)
        runs = False
        try:
            with kept_serve_logs():
                app = await self._build(settings, replica_id, reporter)
            runs = True
        except Exception as error:
            raise start_error(error, reporter.failure) from error
        finally:
            del os.environ[STAGES_FILE]
            await asyncio.to_thread(reporter.close, runs=runs)
        super().__init__(self._engine, app, replica_id)
        self._listener = Listener(
            self, lambda: serve.get_replica_context()._deployment_config.max_ongoing_requests
        )
        address = await self._listener.start(ray.util.get_node_ip_address())
        self._load_reporter = LoadReporter(
            self._engine.vllm_config.cache_config.block_size, address.as_text()
        )
        if self._metrics_reporter is not None:
            self.metrics = self._metrics_reporter.metrics
            self._metrics_reporter.start(
                self._engine.core_state, lambda: self.num_inside, lambda: self._logs.num_dropped
            )
        self.tracing = open_tracing(settings.tracing, REPLICA)
        self._watchdog = asyncio.create_task(
            watch(lambda: self.engine_lost, at_last=partial(close_tracing, self.tracing, 1.0))
        )

    async def _build(
        self, settings: ReplicaSettings, replica_id: str, reporter: StartReporter
    ) -> ASGIApp:
        """Build the engine and the application on top of it."""
        name = settings.served_name
        if settings.metrics:
            # Before vLLM makes its metrics, some of them on import.
            folder = f"{name.replace('/', '-')}-{replica_id}"
            self._process = ProcessMetrics(folder, {"replica": replica_id}, settings.metrics_port)
        # vLLM takes seconds to import; the process that builds the application does not need it.
        from deployments.replica.engine_factory import (
            build_engine,
            build_http_application,
            parsers_of,
            server_arguments,
        )

        self._logs = ProcessLogs(settings.logging, f"replica-{name.replace('/', '-')}")
        args = server_arguments(settings.model, name, settings.engine)
        self._metrics_reporter: ReplicaReporter | None = None
        if settings.metrics:
            metrics = ReplicaMetrics(model=name, replica=replica_id)
            self._metrics_reporter = ReplicaReporter(metrics)
        reporter.reached(Stage.STARTING_ENGINE)
        self._engine = build_engine(args)
        self._engine.pace_streams(settings.coalesce_s)
        reporter.reached(Stage.WARMING_UP)
        await self._engine.warm_up()
        marked = self._engine.format
        return AparExtension(
            await build_http_application(self._engine, args),
            control_token_ids=frozenset(marked.texts if marked else ()),
            take_statistics=self._take_statistics,
            uncounted_token_ids=frozenset(marked.uncounted_ids if marked else ()),
            parsers=parsers_of(args),
        )

    def _take_statistics(self, request_id: str) -> Mapping[str, Any] | None:
        record = self._engine.take_statistics(request_id)
        return None if record is None else record.statistics.to_plain()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Report the load to the routers; called by Ray Serve."""
        state = await self._engine.core_state()
        return asdict(self._load_reporter.report(state, self.num_inside, time.time()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the load to the autoscaling policy; called by Ray Serve."""
        state = await self._engine.core_state()
        return asdict(ReplicaReport.of(self.num_inside, state))

    async def load(self) -> dict[str, Any]:
        """Return the engine core's state, for tests and benchmarks.

        `requests_inside` counts the requests on the HTTP side.
        """
        state = asdict(await self._engine.core_state())
        return {"requests_inside": self._engine.get_num_unfinished_requests()} | state

    # Ray Serve awaits this at shutdown.
    async def __del__(self) -> None:
        # Ray Serve has waited for the calls that came through its handles.
        await self._listener.close()
        self._watchdog.cancel()
        if self._metrics_reporter is not None:
            await self._metrics_reporter.close()
        self._engine.shutdown()
        await close_tracing(self.tracing)
        await asyncio.to_thread(self._logs.close)


@contextmanager
def kept_serve_logs() -> Iterator[None]:
    """Restore Ray Serve's log handlers on exit.

    vLLM configures logging when it is imported, and again with each engine's configuration. Both
    close every handler of the process and detach the file from Ray Serve's. A restarted controller
    asks each replica for that file, and would drop the replicas although they serve.
    """
    targets = [
        (handler, handler.target)
        for handler in logging.getLogger("ray.serve").handlers
        if isinstance(handler, MemoryHandler)
    ]
    try:
        yield
    finally:
        for handler, target in targets:
            handler.setTarget(target)


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    num_steps: int
    num_rows: int
    busy_s: float


class LoadReporter:
    """Builds load reports from the engine core's counters; rates are over the last seconds."""

    def __init__(self, block_size: int, address: str | None = None) -> None:
        self._block_size = block_size
        self._address = address
        self._samples: deque[_Sample] = deque()

    def report(self, state: "CoreState", requests: int, now_s: float) -> ReplicaLoad:
        """Report the load now, with `requests` calls inside the replica.

        The state's own number of requests counts each choice of an answer; Ray Serve's cap counts
        calls.
        """
        sample = _Sample(now_s, 0, 0, 0.0)
        if (steps := state.steps) is not None:
            sample = _Sample(now_s, steps.num_steps, steps.num_rows, steps.busy_s)
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - WINDOW_S:
            self._samples.popleft()
        oldest = self._samples[0]
        busy_s = sample.busy_s - oldest.busy_s
        num_steps = sample.num_steps - oldest.num_steps
        return ReplicaLoad(
            requests=requests,
            threads=state.threads,
            waiting_forks=state.deferred_threads,
            blocks=state.kv_blocks,
            free_blocks=state.free_blocks,
            block_size=self._block_size,
            tokens_per_s=(sample.num_rows - oldest.num_rows) / busy_s if busy_s > 0 else 0.0,
            step_s=busy_s / num_steps if num_steps else 0.0,
            taken_at_s=now_s,
            thread_weight=state.thread_weight,
            address=self._address,
        )


async def watch(
    is_dead: Callable[[], bool],
    *,
    end_process: Callable[[int], None] | None = None,
    period_s: float = WATCHDOG_PERIOD_S,
    last_words_s: float = LAST_WORDS_S,
    at_last: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Watchdog: end the process when the engine is dead, so that Ray Serve replaces the replica.

    After a failed health check alone, the replica would answer with errors for seconds, because
    Ray Serve's teardown waits for requests that cannot finish. `at_last` runs just before the end
    and must be quick.
    """
    while not is_dead():  # noqa: ASYNC110 - the engine sets a flag when it dies, no event
        await asyncio.sleep(period_s)
    logger.error("engine lost; ending the replica")
    await asyncio.sleep(last_words_s)
    if at_last is not None:
        await at_last()
    (end_process or end_with_children)(EXIT_STATUS)


def end_with_children(status: int) -> None:
    """Kill this process's children, then end it: a hung engine would survive its replica."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(status)
