"""Measurements beside the requests: load of the client, and metrics of the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np

from cluster.loadtest.run_file import (
    SETTLE_S,
    ClientFigures,
    ClusterFigures,
    ClusterMoment,
    RequestRecord,
)
from cluster.monitor.overview import MonitorError
from cluster.monitor.rates import increase
from cluster.monitor.series import SeriesKey, Snapshot, largest, summed, total
from cluster.monitor.sources import PageError, PagesSource
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Metric

_SECOND_S = 1.0
_BEAT_S = 0.02


@dataclass(slots=True)
class ClientWatch:
    """Measures CPU usage and event loop lag of this process during a repeat."""

    _lags_s: list[float] = field(default_factory=list)
    _cpu_shares: list[float] = field(default_factory=list)
    _cpu_s: float = 0.0
    _wall_s: float = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Measure until the end of the block."""
        started = (time.process_time(), time.perf_counter())
        beat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beat.cancel()
            self._cpu_s = time.process_time() - started[0]
            self._wall_s = time.perf_counter() - started[1]

    def figures(self, records: Sequence[RequestRecord]) -> ClientFigures:
        """Return the measurements, and the sending delay of these requests."""
        share = self._cpu_s / self._wall_s if self._wall_s else 0.0
        lags = self._lags_s or [0.0]
        late = [record.late_s for record in records if record.late_s is not None]
        return ClientFigures(
            cpu_share=share,
            busiest_cpu_share=max(self._cpu_shares, default=share),
            lag_p50_s=float(np.percentile(lags, 50)),
            lag_p99_s=float(np.percentile(lags, 99)),
            lag_max_s=max(lags),
            late_p99_s=float(np.percentile(late, 99)) if late else None,
        )

    async def _beat(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        while True:
            asked = time.perf_counter() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            now = time.perf_counter()
            self._lags_s.append(now - asked)
            if now - wall >= _SECOND_S:
                used = time.process_time()
                self._cpu_shares.append((used - cpu) / (now - wall))
                cpu, wall = used, now


_LOOK_S = 1.0
# Other clients may keep a server busy.
_MAX_SETTLE_PERIODS = 3
_COUNTED = frozenset(
    metric.name
    for metric in (
        catalogue.GENERATED_TOKENS,
        catalogue.ENGINE_STEPS,
        catalogue.ENGINE_BUSY_SECONDS,
        catalogue.FORKS,
        catalogue.KV_SHARED_BLOCKS,
        catalogue.KV_COPIED_BLOCKS,
        catalogue.ATTENDED_TOKENS,
        catalogue.SEQUENTIAL_ATTENDED_TOKENS,
        catalogue.CACHED_TOKENS,
        catalogue.SEQUENTIAL_CACHED_TOKENS,
    )
)


@dataclass(slots=True)
class ClusterWatch:
    """Reads metrics pages periodically during a repeat.

    An unreachable page is counted as a failure; its next answer includes the missing increase.
    `waiting` is a context entered while waiting for the last counts.
    """

    source: PagesSource
    every_s: float
    settle_s: float = SETTLE_S
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    _last: Snapshot | None = None
    _gained: dict[SeriesKey, float] = field(default_factory=dict)
    _moments: list[ClusterMoment] = field(default_factory=list)
    _failures: int = 0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Read before, during and after the block.

        Raises MonitorError if the first reading fails.
        """
        await asyncio.to_thread(self._begin)
        ended = asyncio.Event()
        reading = asyncio.create_task(self._read_often(time.perf_counter(), ended))
        try:
            yield
        finally:
            ended.set()
            await reading
            await self.settle()

    async def settle(self) -> None:
        """Read until counters have been constant for `settle_s`, at most three times that long.

        Raises MonitorError if the first reading fails.
        """
        with self.waiting():
            if self._last is None:
                await asyncio.to_thread(self._begin)
            began_s = still_s = time.perf_counter()
            while True:
                stood_still = await asyncio.to_thread(self._read, None)
                now_s = time.perf_counter()
                still_s = still_s if stood_still else now_s
                waited = now_s - began_s >= _MAX_SETTLE_PERIODS * self.settle_s
                if waited or now_s - still_s >= self.settle_s:
                    return
                await asyncio.sleep(min(_LOOK_S, self.settle_s / 4))

    def figures(self) -> ClusterFigures:
        """Return the increases between the first and the last reading."""

        def gained(metric: Metric) -> float:
            return total(self._gained, metric)

        forks = summed(self._gained, catalogue.FORKS, "outcome")
        return ClusterFigures(
            generated_tokens=gained(catalogue.GENERATED_TOKENS),
            engine_steps=gained(catalogue.ENGINE_STEPS),
            engine_busy_s=gained(catalogue.ENGINE_BUSY_SECONDS),
            forks={outcome: count for (outcome,), count in sorted(forks.items())},
            shared_blocks=gained(catalogue.KV_SHARED_BLOCKS),
            copied_blocks=gained(catalogue.KV_COPIED_BLOCKS),
            attended_tokens=gained(catalogue.ATTENDED_TOKENS),
            sequential_attended_tokens=gained(catalogue.SEQUENTIAL_ATTENDED_TOKENS),
            cached_tokens=gained(catalogue.CACHED_TOKENS),
            sequential_cached_tokens=gained(catalogue.SEQUENTIAL_CACHED_TOKENS),
            moments=self._moments,
            failures=self._failures,
        )

    def _begin(self) -> None:
        try:
            snapshot = self.source.read()
        except PageError as error:
            raise MonitorError(f"--metrics: {error}") from error
        if not snapshot.values:
            raise MonitorError(
                f"--metrics {', '.join(self.source.addresses)}: no metrics of this cluster"
            )
        self._last = snapshot

    async def _read_often(self, started_s: float, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self.every_s)
            if not ended.is_set():
                await asyncio.to_thread(self._read, started_s)

    def _read(self, started_s: float | None) -> bool:
        """Take a reading, after the run (`started_s` is None) of counters only.

        Returns whether it succeeded and no counter increased.
        """
        assert self._last is not None
        try:
            snapshot = self.source.read()
        except PageError:
            self._failures += 1
            return False
        gained = increase(self._last, snapshot)
        for key, amount in gained.items():
            self._gained[key] = self._gained.get(key, 0.0) + amount
        self._last = snapshot
        if started_s is not None:
            self._moments.append(_moment(time.perf_counter() - started_s, snapshot))
        return not any(amount for key, amount in gained.items() if key.name in _COUNTED)


def _moment(at_s: float, snapshot: Snapshot) -> ClusterMoment:
    threads = summed(snapshot.values, catalogue.THREADS, "state")
    return ClusterMoment(
        at_s=at_s,
        kv_share=largest(snapshot.values, catalogue.KV_CACHE_USAGE).get((), 0.0),
        running=threads.get(("running",), 0.0),
        waiting=threads.get(("waiting",), 0.0),
        deferred=threads.get(("deferred",), 0.0),
    )
