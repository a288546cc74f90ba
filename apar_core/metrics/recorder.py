"""Counts of one process, by their declarations."""

from __future__ import annotations

import math
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge

from apar_core.metrics.counting import Counter, Histogram
from apar_core.metrics.engine import Kind, Metric


class Recorder:
    """Metrics of one process as prometheus_client's; `labels` are shared by all that have them.

    `open_process` in `deployments/metrics/node.py`, called before, brings them to the node's page.
    """

    def __init__(self, *, registry: CollectorRegistry | None = None, **labels: str) -> None:
        """Count in a registry, by default one of its own."""
        self.registry = CollectorRegistry() if registry is None else registry
        self._shared = labels
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        # By name and label values; prometheus_client takes a lock to find a series.
        self._series: dict[tuple[str, ...], Counter | Gauge | Histogram] = {}
        self._totals: dict[tuple[str, ...], float] = {}

    def inc(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter; an amount of 0 makes the series exist."""
        series = self._find(metric, labels)
        assert isinstance(series, Counter)
        series.inc(amount)

    def set_total(self, metric: Metric, total: float, **labels: str) -> None:
        """Set a counter whose count is kept elsewhere; a lower value is ignored."""
        key = self._key(metric, labels)
        before = self._totals.get(key, 0.0)
        self.inc(metric, max(total - before, 0.0), **labels)
        self._totals[key] = max(total, before)

    def set(self, metric: Metric, value: float | None, **labels: str) -> None:
        """Set a gauge; None, an unknown value, takes the series off the page."""
        series = self._find(metric, labels)
        assert isinstance(series, Gauge)
        series.set(math.nan if value is None else value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        series = self._find(metric, labels)
        assert isinstance(series, Histogram)
        series.observe(value)

    def declare(self, metric: Metric, **labels: str) -> None:
        """Start a counter or histogram at 0: Prometheus sees no increase to a first value."""
        self._find(metric, labels)

    def value(self, metric: Metric, part: str = "", **labels: str) -> float | None:
        """Return the value of a series in this process, None if it does not exist.

        `part` is `_sum`, `_count` or `_bucket` (with the label `le`) of a histogram.
        """
        own = {name: text for name, text in self._shared.items() if name in metric.labels}
        return self.registry.get_sample_value(metric.name + part, own | labels)

    def _find(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        key = self._key(metric, labels)
        series = self._series.get(key)
        if series is None:
            family = self._families.get(metric.name)
            if family is None:
                family = self._families[metric.name] = self._make(metric)
            series = self._series[key] = family.labels(*key[1:]) if metric.labels else family
        return series

    def _key(self, metric: Metric, labels: dict[str, str]) -> tuple[str, ...]:
        """Name and label values; raises KeyError if one is missing."""
        given = self._shared | labels
        return (metric.name, *[given[name] for name in metric.labels])

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        labels = tuple(metric.labels)
        if metric.kind is Kind.COUNTER:
            return Counter(metric.name, metric.help, labels, registry=self.registry)
        if metric.kind is Kind.GAUGE:
            mode: Literal["max", "sum"] = "max" if metric.same_everywhere else "sum"
            return Gauge(
                metric.name, metric.help, labels, registry=self.registry, multiprocess_mode=mode
            )
        return Histogram(
            metric.name, metric.help, labels, registry=self.registry, buckets=metric.buckets
        )
