"""The numbers of one process, by the metrics of the catalogue."""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from ray.util import metrics

from cluster.metrics.catalogue import Metric

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of their names."""

Hand = Callable[[float, dict[str, str]], None]
"""Takes a number and its labels: a counter's increase, or a gauge's value."""


class Instruments(Protocol):
    """Makes what numbers are handed to."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Something that adds up."""

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Something that keeps the last value."""


class Counter:
    """Counts up. A count that has been named is handed over from the start, as 0."""

    def __init__(
        self, instruments: Instruments, name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        self._labels = labels
        self._hand = instruments.counter(name, text, labels)
        self._totals: dict[Labels, float] = {}
        self._handed: dict[Labels, float] = {}

    def inc(self, labels: Labels, amount: float = 1.0) -> None:
        """Add to a count."""
        self._totals[labels] = self._totals.get(labels, 0.0) + amount

    def set_total(self, labels: Labels, total: float) -> None:
        """Take a count that is kept elsewhere; it never falls."""
        self._totals[labels] = max(total, self._totals.get(labels, 0.0))

    def flush(self) -> None:
        """Hand over what has been added."""
        for labels, total in self._totals.items():
            handed = self._handed.get(labels)
            if handed is None or total > handed:
                self._handed[labels] = total
                self._hand(total - (handed or 0.0), dict(zip(self._labels, labels, strict=True)))


class Gauge:
    """Has a value now. Ray drops one that is not handed over again for a while."""

    def __init__(
        self, instruments: Instruments, name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        self._labels = labels
        self._hand = instruments.gauge(name, text, labels)
        self._values: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float) -> None:
        """Take the value of now."""
        self._values[labels] = value

    def clear(self) -> None:
        """Forget all values: what is not set again is told no more."""
        self._values.clear()

    def flush(self) -> None:
        """Hand all values over."""
        for labels, value in self._values.items():
            self._hand(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """Observations by upper bounds, handed over as the gauges `_bucket`, `_sum` and `_count`.

    Ray's own histograms would lose the observed values: its agent puts each in the middle of its
    bucket, so that their sum is wrong, and takes a call for each. As gauges, the very numbers
    arrive that a Prometheus client would tell.
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
        self._names = (*(_bound_name(bound) for bound in self._bounds), "+Inf")
        self._bucket = instruments.gauge(f"{name}_bucket", text, (*labels, "le"))
        self._sum = instruments.gauge(f"{name}_sum", text, labels)
        self._count = instruments.gauge(f"{name}_count", text, labels)
        # Observations by bucket, each in one; and the sum of their values.
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def declare(self, labels: Labels) -> list[int]:
        """Tell of these labels from now on, of no observation at first."""
        self._sums.setdefault(labels, 0.0)
        return self._counts.setdefault(labels, [0] * len(self._names))

    def observe(self, labels: Labels, value: float) -> None:
        """Count an observation."""
        counts = self._counts.get(labels) or self.declare(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def flush(self) -> None:
        """Hand the counts over, each bucket with those below it."""
        for labels, counts in self._counts.items():
            tags = dict(zip(self._labels, labels, strict=True))
            so_far = 0
            for name, count in zip(self._names, counts, strict=True):
                so_far += count
                self._bucket(so_far, {**tags, "le": name})
            self._sum(self._sums[labels], tags)
            self._count(so_far, tags)


def _bound_name(bound: float) -> str:
    """As Prometheus' clients write it."""
    return repr(float(bound))


Family = TypeVar("Family", Counter, Gauge, Histogram)


class Recorder:
    """Takes what happens, in plain numbers, and hands it over with `flush`.

    `labels` are those that all metrics of the process share, as far as a metric has them. Not for
    several executors at once.
    """

    def __init__(self, instruments: Instruments, **labels: str) -> None:
        self._instruments = instruments
        self._shared = labels
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def inc(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Count something; an amount of 0 makes the count known."""
        self._counter(metric).inc(self._values(metric, labels), amount)

    def set_total(self, metric: Metric, total: float, **labels: str) -> None:
        """Take a count that is kept elsewhere."""
        self._counter(metric).set_total(self._values(metric, labels), total)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Take a value of now; it is told once, with the next `flush`."""
        gauge = self._gauges.get(metric.name)
        if gauge is None:
            gauge = Gauge(self._instruments, metric.name, metric.help, tuple(metric.labels))
            self._gauges[metric.name] = gauge
        gauge.set(self._values(metric, labels), value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Take one observation of a histogram."""
        self._histogram(metric).observe(self._values(metric, labels), value)

    def declare(self, metric: Metric, **labels: str) -> None:
        """Make a histogram known before its first observation."""
        self._histogram(metric).declare(self._values(metric, labels))

    def flush(self) -> None:
        """Hand over what there is."""
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
        """Raises KeyError where a label of the metric has no value."""
        given = {**self._shared, **labels} if self._shared else labels
        return tuple([given[name] for name in metric.labels])


class RayInstruments:
    """Instruments of the Ray process that this is.

    `Metric._record` instead of its public callers, because `Counter.inc` refuses 0: a count that
    first appears as 1 never rises in the eyes of Prometheus.
    """

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """A counter; Ray's agent writes `_total` behind its name where that is missing."""
        return metrics.Counter(name, text, labels)._record

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """A gauge."""
        return metrics.Gauge(name, text, labels)._record


class NoInstruments:
    """Instruments that take everything and tell nobody."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Nothing to tell."""
        return _unheard

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Nothing to tell."""
        return _unheard


def _unheard(value: float, labels: dict[str, str]) -> None:
    """Nobody wants to know."""


logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class FlushTimer:
    """Owns the task that calls `flush` every `period_s` in the running event loop.

    A flush that fails is logged, once for each run of failures, and the next one comes in time.
    """

    def __init__(self, flush: Callable[[], Awaitable[None]], *, period_s: float = PERIOD_S) -> None:
        self._flush = flush
        self._period_s = period_s
        self._failing = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, after a last flush."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._flush_logged()

    def stop(self) -> None:
        """Stop without a last flush, where nobody may wait for it."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await self._flush_logged()
            await asyncio.sleep(self._period_s)

    async def _flush_logged(self) -> None:
        try:
            await self._flush()
        except Exception as error:  # metrics must not end what they tell of
            if not self._failing:
                logger.warning("metrics not handed over", exc_info=error)
            self._failing = True
        else:
            self._failing = False
