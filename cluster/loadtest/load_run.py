"""A whole load test: warm-up requests, then the repeats, measured and written to the run folder."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import uvloop

from apar_core.installation import processor_name
from cluster.loadtest.arrivals import AllAtOnce, Arrivals, ClosedLoop
from cluster.loadtest.client import LoadClient
from cluster.loadtest.jobs import Job, PlannedJobs
from cluster.loadtest.live_view import LiveView
from cluster.loadtest.run_file import (
    Answered,
    AnswerFile,
    LoadSettings,
    RepeatFacts,
    RequestRecord,
    RunFacts,
    RunFolder,
)
from cluster.loadtest.watches import ClientWatch, ClusterWatch
from cluster.monitor.sources import PagesSource

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_in_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in uvloop, which uses less CPU than asyncio's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


@dataclass(slots=True)
class Stop:
    """Interrupts a run: no more requests are sent, and running ones are cancelled."""

    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def asked(self) -> bool:
        """Whether the run was interrupted."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Interrupt the run."""
        self._asked.set()
        for task in self._tasks:
            task.cancel()

    def hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Cancel this task if the run is interrupted."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sleep(self, seconds: float) -> None:
        """Sleep, but wake up if the run is interrupted."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), seconds)


@dataclass(slots=True)
class Drive:
    """Sends the jobs of one repeat according to their arrivals.

    Calls `take` with each finished request. No request is sent after `longest_s` seconds.
    """

    client: LoadClient
    repeat: int
    stop: Stop
    take: Callable[[Answered], None]
    longest_s: float = float("inf")
    _start_s: float = 0.0

    async def run(self, jobs: Sequence[Job], arrivals: Arrivals, seed: int) -> float:
        """Send the jobs, wait for all answers, and return the duration in seconds."""
        self._start_s = time.perf_counter()
        if isinstance(arrivals, ClosedLoop):
            await self._closed(jobs, arrivals.concurrency)
        else:
            await self._open(jobs, arrivals.times_s(len(jobs), seed))
        return self._now_s

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def _open(self, jobs: Sequence[Job], times_s: Sequence[float]) -> None:
        tasks = []
        for index, (job, time_s) in enumerate(zip(jobs, times_s, strict=True)):
            if time_s > self._now_s:
                await self.stop.sleep(time_s - self._now_s)
            if self.stop.asked or time_s >= self.longest_s:
                break
            tasks.append(self.stop.hold(asyncio.create_task(self._send(index, job, time_s))))
        await _ended(tasks)

    async def _closed(self, jobs: Sequence[Job], concurrency: int) -> None:
        waiting = iter(enumerate(jobs))
        await _ended(
            [
                self.stop.hold(asyncio.create_task(self._work(waiting)))
                for _ in range(min(concurrency, len(jobs)))
            ]
        )

    async def _work(self, waiting: Iterator[tuple[int, Job]]) -> None:
        for index, job in waiting:
            if self.stop.asked or self._now_s >= self.longest_s:
                return
            await self._send(index, job, None)

    async def _send(self, index: int, job: Job, planned_s: float | None) -> None:
        self.take(
            await self.client.send(
                job,
                repeat=self.repeat,
                index=index,
                start_s=self._start_s,
                planned_s=planned_s,
            )
        )


@dataclass(slots=True)
class LoadRun:
    """A load test; call `run` once.

    `answers` optionally records the answers. `source` optionally provides the cluster's metrics.
    """

    settings: LoadSettings
    planned: PlannedJobs
    arrivals: Arrivals
    folder: RunFolder
    view: LiveView
    answers: AnswerFile | None = None
    source: PagesSource | None = None
    server_version: str | None = None
    _stop: Stop = field(default_factory=Stop)
    _facts: list[RepeatFacts] = field(default_factory=list)

    async def run(self) -> None:
        """Run until the end or the first Ctrl-C, and write the results.

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
                    client=(
                        f"apar-serve {version('apar-serve')}, Python {platform.python_version()}, "
                        f"{os.cpu_count()} cores of {processor_name()}"
                    ),
                    server_version=self.server_version,
                    repeats=self._facts,
                    left_out=self.planned.left_out,
                    repeated=self.planned.repeated,
                )
            )

    async def _warm_up(self, client: LoadClient) -> None:
        """Send the first jobs at once and discard their answers."""
        jobs = self.planned.jobs[: self.settings.warm_up]
        with self.view.stage("warm-up", len(jobs), client) as show:
            await Drive(client, -1, self._stop, show).run(jobs, AllAtOnce(), self.settings.seed)
        cluster = self._cluster_watch()
        if jobs and cluster is not None and not self._stop.asked:
            # Otherwise the first repeat would include their counts.
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
        """Let the first signal interrupt the run; a second one ends the process."""
        loop = asyncio.get_running_loop()

        def restore() -> None:
            for number in _SIGNALS:
                with suppress(ValueError, RuntimeError):
                    loop.remove_signal_handler(number)

        def end() -> None:
            restore()
            self._stop.ask()

        for number in _SIGNALS:
            # Signals work only in the main thread; tests run in others.
            with suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, end)
        return restore


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks and raise the first error, ignoring cancelled tasks."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
