"""Sends the jobs of one repeat when their time comes, and ends early when it is told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from apar_core.workload.arrivals import Arrivals, ClosedLoop
from cluster.loadtest.client import Answered, LoadClient
from cluster.loadtest.jobs import Job

Take = Callable[[Answered], None]


@dataclass(slots=True)
class Stop:
    """Ends a run: nothing more is sent, and what is under way is cancelled."""

    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def asked(self) -> bool:
        """Whether the run shall end."""
        return self._asked.is_set()

    def ask(self) -> None:
        """End it now."""
        self._asked.set()
        for task in self._tasks:
            task.cancel()

    def hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Cancel this task too when the run is ended."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def sleep(self, seconds: float) -> None:
        """Sleep so long, or until the run shall end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), seconds)


@dataclass(slots=True)
class Drive:
    """One repeat: sends jobs with `client`, and gives every answer to `take` when it has ended.

    After `longest_s` seconds nothing more is sent.
    """

    client: LoadClient
    repeat: int
    stop: Stop
    take: Take
    longest_s: float = float("inf")
    _start_s: float = 0.0

    async def run(self, jobs: Sequence[Job], arrivals: Arrivals, seed: int) -> float:
        """Send the jobs and wait for all answers; return how many seconds that took."""
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


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all of them; raise the first error but for those of tasks that never began."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
