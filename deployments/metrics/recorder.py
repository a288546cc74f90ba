"""Numbers of one process, kept locally and passed to Ray's metrics by `Recorder.flush`.

Calling Ray for every event would cost too much: its agent handles each call in Python.
"""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ray.util import metrics

from cluster.metrics.catalogue import Metric

logger = logging.getLogger(__name__)

FLUSH_PERIOD_S = 1.0

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of their names."""

Emit = Callable[[float, dict[str, str]], None]
"""Takes a number and its labels: the increase of a counter, or the value of a gauge."""


class Instruments(Protocol):
    """Makes the functions that numbers are passed to."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Make a counter."""

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Make a gauge."""


class RayInstruments:
    """Metrics of the current Ray process.

    Uses `Metric._record`, because the public `Counter.inc` refuses 0. Prometheus sees no increase
    in a counter that first appears as 1.
    """

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Make a counter; Ray's agent appends `_total` to its name if that is missing."""
        return metrics.Counter(name, text, labels)._record

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Make a gauge."""
        return metrics.Gauge(name, text, labels)._record


class NoInstruments:
    """Discard all numbers, for a process without metrics."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Discard."""
        return lambda value, labels: None

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Discard."""
        return lambda value, labels: None


class Counter:
    """Counter with labels. A series exists from its first `inc`, even of 0."""

    def __init__(
        self, instruments: Instruments, name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        self._labels = labels
        self._emit = instruments.counter(name, text, labels)
        self._totals: dict[Labels, float] = {}
        self._emitted: dict[Labels, float] = {}

    def inc(self, labels: Labels, amount: float = 1.0) -> None:
        """Increase a count."""
        self._totals[labels] = self._totals.get(labels, 0.0) + amount

    def set_total(self, labels: Labels, total: float) -> None:
        """Set a count that is kept elsewhere; a lower value is ignored."""
        self._totals[labels] = max(total, self._totals.get(labels, 0.0))

    def flush(self) -> None:
        """Emit the increases."""
        for labels, total in self._totals.items():
            emitted = self._emitted.get(labels)
            if emitted is None or total > emitted:
                self._emitted[labels] = total
                self._emit(total - (emitted or 0.0), dict(zip(self._labels, labels, strict=True)))


class Gauge:
    """Gauge with labels. Ray drops a series that is not emitted again for a while."""

    def __init__(
        self, instruments: Instruments, name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        self._labels = labels
        self._emit = instruments.gauge(name, text, labels)
        self._values: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float) -> None:
        """Set the current value."""
        self._values[labels] = value

    def clear(self) -> None:
        """Forget all values; series that are not set again end."""
        self._values.clear()

    def flush(self) -> None:
        """Emit all values."""
        for labels, value in self._values.items():
            self._emit(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """Histogram with labels, emitted as the gauges `_bucket`, `_sum` and `_count`.

    Ray's own histograms lose the observed values: its agent replaces each by the middle of its
    bucket, so that the sum is wrong, and needs a call per observation.
    """

    def __init__(
        self,
        instruments: Instruments,
        name: str,
        text: str,
        labels: tuple[str, ...],
        buckets: Sequence[float],
    ) -> None:
        self._labels = labels
        self._bounds = tuple(buckets)
        # Written as Prometheus' clients do.
        self._names = (*(repr(float(bound)) for bound in self._bounds), "+Inf")
        self._bucket = instruments.gauge(f"{name}_bucket", text, (*labels, "le"))
        self._sum = instruments.gauge(f"{name}_sum", text, labels)
        self._count = instruments.gauge(f"{name}_count", text, labels)
        # Observations per bucket, not cumulative, and the sum of their values.
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def declare(self, labels: Labels) -> list[int]:
        """Emit these labels from now on, with no observation at first."""
        self._sums.setdefault(labels, 0.0)
        return self._counts.setdefault(labels, [0] * len(self._names))

    def observe(self, labels: Labels, value: float) -> None:
        """Add an observation."""
        counts = self._counts.get(labels) or self.declare(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def flush(self) -> None:
        """Emit the cumulative buckets, the sum and the count."""
        for labels, counts in self._counts.items():
            tags = dict(zip(self._labels, labels, strict=True))
            so_far = 0
            for name, count in zip(self._names, counts, strict=True):
                so_far += count
                self._bucket(so_far, {**tags, "le": name})
            self._sum(self._sums[labels], tags)
            self._count(so_far, tags)


class Recorder:
    """Numbers of one process by the metrics of the catalogue; not thread-safe.

    `labels` are shared by all metrics that have them.
    """

    def __init__(self, instruments: Instruments, **labels: str) -> None:
        self._instruments = instruments
        self._shared = labels
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def inc(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter; an amount of 0 makes the series exist."""
        self._counter(metric).inc(self._values(metric, labels), amount)

    def set_total(self, metric: Metric, total: float, **labels: str) -> None:
        """Set a counter whose count is kept elsewhere."""
        self._counter(metric).set_total(self._values(metric, labels), total)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge for the next `flush` only."""
        gauge = self._gauges.get(metric.name)
        if gauge is None:
            gauge = Gauge(self._instruments, metric.name, metric.help, tuple(metric.labels))
            self._gauges[metric.name] = gauge
        gauge.set(self._values(metric, labels), value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        self._histogram(metric).observe(self._values(metric, labels), value)

    def declare(self, metric: Metric, **labels: str) -> None:
        """Make the series of a histogram exist before its first observation."""
        self._histogram(metric).declare(self._values(metric, labels))

    def flush(self) -> None:
        """Emit everything."""
        for counter in self._counters.values():
            counter.flush()
        for gauge in self._gauges.values():
            gauge.flush()
            gauge.clear()
        for histogram in self._histograms.values():
            histogram.flush()

    def _counter(self, metric: Metric) -> Counter:
        counter = self._counters.get(metric.name)
        if counter is None:
            counter = Counter(self._instruments, metric.name, metric.help, tuple(metric.labels))
            self._counters[metric.name] = counter
        return counter

    def _histogram(self, metric: Metric) -> Histogram:
        histogram = self._histograms.get(metric.name)
        if histogram is None:
            histogram = Histogram(
                self._instruments, metric.name, metric.help, tuple(metric.labels), metric.buckets
            )
            self._histograms[metric.name] = histogram
        return histogram

    def _values(self, metric: Metric, labels: dict[str, str]) -> Labels:
        """Order the label values; raises KeyError if one is missing."""
        given = {**self._shared, **labels} if self._shared else labels
        return tuple([given[name] for name in metric.labels])


class FlushTimer:
    """Owns the task that calls `flush` every `period_s` in the running event loop.

    A failing flush is logged once per run of failures, and tried again at the next period.
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
                logger.warning("metrics not exported", exc_info=error)
            self._failing = True
        else:
            self._failing = False
