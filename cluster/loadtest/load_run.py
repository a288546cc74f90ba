"""A whole load test: warm-up requests, then the repeats, each watched and written down."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import uvloop

from apar_core.workload.arrivals import AllAtOnce, Arrivals
from cluster.loadtest.arrivals_drive import Drive, Stop
from cluster.loadtest.client import Answered, LoadClient
from cluster.loadtest.client_watch import ClientWatch
from cluster.loadtest.cluster_watch import ClusterWatch
from cluster.loadtest.jobs import PlannedJobs
from cluster.loadtest.live_view import LiveView
from cluster.loadtest.records import RequestRecord
from cluster.loadtest.run_file import AnswerFile, LoadSettings, RepeatFacts, RunFacts, RunFolder
from cluster.monitor.sources import PagesSource

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_in_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it in uvloop's event loop, which needs less of the client's CPU than asyncio's own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


@dataclass(slots=True)
class LoadRun:
    """What a load test works with; call `run` once.

    `answers` takes the texts, `source` is asked for the cluster's metrics, where given.
    """

    settings: LoadSettings
    planned: PlannedJobs
    arrivals: Arrivals
    folder: RunFolder
    view: LiveView
    answers: AnswerFile | None = None
    source: PagesSource | None = None
    _stop: Stop = field(default_factory=Stop)
    _facts: list[RepeatFacts] = field(default_factory=list)

    async def run(self) -> None:
        """Run to the end, or to the first Ctrl-C; what there is has then been written.

        Raises MonitorError if the cluster's metrics cannot be read at the start of a repeat.
        """
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        restore = self._catch_signals()
        try:
            async with LoadClient(
                self.settings.target, timeout_s=self.settings.timeout_s
            ) as client:
                await self._warm_up(client)
                for repeat in range(self.settings.repeats):
                    if not self._stop.asked:
                        self._facts.append(await self._repeat(client, repeat))
        finally:
            restore()
            self.folder.write_facts(
                RunFacts(
                    settings=self.settings,
                    started=started,
                    repeats=self._facts,
                    left_out=self.planned.left_out,
                    repeated=self.planned.repeated,
                )
            )

    async def _warm_up(self, client: LoadClient) -> None:
        """Send some of the jobs at once, and forget their answers."""
        jobs = self.planned.jobs[: self.settings.warm_up]
        with self.view.stage("warm-up", len(jobs), client) as show:
            await Drive(client, -1, self._stop, show).run(jobs, AllAtOnce(), self.settings.seed)
        cluster = self._cluster_watch()
        if jobs and cluster is not None and not self._stop.asked:
            # Or the first repeat would have their counts.
            settling = self._stop.hold(asyncio.create_task(cluster.settle()))
            await asyncio.wait([settling])
            if not settling.cancelled():
                settling.result()

    async def _repeat(self, client: LoadClient, repeat: int) -> RepeatFacts:
        records: list[RequestRecord] = []
        jobs = self.planned.jobs
        number = f"repeat {repeat + 1} of {self.settings.repeats}"
        watch = ClientWatch()
        cluster = self._cluster_watch()
        async with AsyncExitStack() as stack:
            if cluster is not None:
                await stack.enter_async_context(cluster.watching())
            show = stack.enter_context(self.view.stage(number, len(jobs), client))
            await stack.enter_async_context(watch.watching())
            longest_s = self.settings.longest_s or float("inf")
            take = self._taker(records, show)
            duration_s = await Drive(client, repeat, self._stop, take, longest_s).run(
                jobs, self.arrivals, self.settings.seed + repeat
            )
        return RepeatFacts(
            repeat=repeat,
            planned=len(jobs),
            duration_s=duration_s,
            interrupted=self._stop.asked,
            client=watch.figures(records),
            cluster=cluster.figures() if cluster is not None else None,
        )

    def _cluster_watch(self) -> ClusterWatch | None:
        if self.source is None:
            return None
        return ClusterWatch(
            self.source, self.settings.sample_s, self.settings.settle_s, self.view.settling
        )

    def _taker(
        self, records: list[RequestRecord], show: Callable[[Answered], None]
    ) -> Callable[[Answered], None]:
        def take(answered: Answered) -> None:
            records.append(answered.record)
            self.folder.add(answered.record)
            if self.answers is not None:
                self.answers.add(answered, self.settings.model)
            show(answered)

        return take

    def _catch_signals(self) -> Callable[[], None]:
        """Let the first signal end the run in order; a second one ends the process as ever."""
        loop = asyncio.get_running_loop()

        def restore() -> None:
            for number in _SIGNALS:
                with suppress(ValueError, RuntimeError):
                    loop.remove_signal_handler(number)

        def end() -> None:
            restore()
            self._stop.ask()

        for number in _SIGNALS:
            # Only the main thread takes signals; a run elsewhere, as in tests, goes without.
            with suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, end)
        return restore
