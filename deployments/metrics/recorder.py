"""The numbers of one process, by the metrics of the catalogue."""

from typing import TypeVar

from cluster.metrics.catalogue import Metric
from deployments.metrics.families import Counter, Gauge, Histogram, Instruments, Labels

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
