"""vLLM's own metrics, recorded at every engine step and emitted once a second.

vLLM's `RayPrometheusStatLogger` calls Ray for every token of every request, and Ray's agent handles
each call in Python. This version keeps the names and labels but counts locally.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from apar_core.vllm_names import (
    RayKVConnectorProm,
    RayPerfMetricsProm,
    RayPrometheusMetric,
    RayPrometheusStatLogger,
    RaySpecDecodingProm,
)
from deployments.metrics.recorder import Counter, Gauge, Histogram, Instruments, Labels

REPLICA_LABEL = "ReplicaId"
"""vLLM's name for the label that holds Ray Serve's replica id."""


class VllmStats:
    """vLLM's metrics of one replica; pass the class `stat_logger` to the engine."""

    def __init__(self, instruments: Instruments, replica_id: str) -> None:
        self.instruments = instruments
        self.replica_id = replica_id
        self._families: list[Counter | Gauge | Histogram] = []
        classes = {
            "_gauge_cls": partial(_GaugeMetric, self),
            "_counter_cls": partial(_CounterMetric, self),
            "_histogram_cls": partial(_HistogramMetric, self),
        }
        parts = {
            "_spec_decoding_cls": RaySpecDecodingProm,
            "_kv_connector_cls": RayKVConnectorProm,
            "_perf_metrics_cls": RayPerfMetricsProm,
        }
        made = {name: type(part.__name__, (part,), classes) for name, part in parts.items()}
        self.stat_logger: type[RayPrometheusStatLogger] = type(
            "BufferedStatLogger", (RayPrometheusStatLogger,), {**classes, **made}
        )

    def add(self, family: Counter | Gauge | Histogram) -> None:
        """Include a metric in `flush`."""
        self._families.append(family)

    def flush(self) -> None:
        """Emit all metrics."""
        for family in self._families:
            family.flush()


class _Metric:
    """Stand-in for a metric of the Prometheus client, as vLLM's code uses it."""

    def __init__(self, stats: VllmStats, name: str, labelnames: Sequence[str] | None) -> None:
        self._labelnames = tuple(labelnames or ())
        self._replica_id = stats.replica_id
        self.name = RayPrometheusMetric._get_sanitized_opentelemetry_name(name)
        self.labelnames = (*self._labelnames, REPLICA_LABEL)
        self._values: Labels = (stats.replica_id,)

    def _take(self, values: Sequence[object], named: dict[str, object]) -> Labels:
        given = values or [named[name] for name in self._labelnames]
        return (*map(str, given), self._replica_id)


class _CounterMetric(_Metric):
    def __init__(
        self,
        stats: VllmStats,
        name: str,
        documentation: str = "",
        labelnames: Sequence[str] | None = None,
    ) -> None:
        super().__init__(stats, name, labelnames)
        self.family = Counter(stats.instruments, self.name, documentation, self.labelnames)
        stats.add(self.family)

    def labels(self, *values: object, **named: object) -> "_Labelled":
        """Return the series with these labels, which exists from now on."""
        taken = self._take(values, named)
        self.family.inc(taken, 0.0)
        return _Labelled(inc=partial(self.family.inc, taken))

    def inc(self, amount: float = 1.0) -> None:
        """Increase the count without labels."""
        self.family.inc(self._values, amount)


class _GaugeMetric(_Metric):
    def __init__(
        self,
        stats: VllmStats,
        name: str,
        documentation: str = "",
        labelnames: Sequence[str] | None = None,
        multiprocess_mode: str = "",
    ) -> None:
        super().__init__(stats, name, labelnames)
        self.family = Gauge(stats.instruments, self.name, documentation, self.labelnames)
        stats.add(self.family)

    def labels(self, *values: object, **named: object) -> "_Labelled":
        """Return the series with these labels."""
        return _Labelled(set=partial(self.family.set, self._take(values, named)))

    def set(self, value: float) -> None:
        """Set the value without labels."""
        self.family.set(self._values, value)


class _HistogramMetric(_Metric):
    def __init__(
        self,
        stats: VllmStats,
        name: str,
        documentation: str = "",
        labelnames: Sequence[str] | None = None,
        buckets: Sequence[float] = (),
    ) -> None:
        super().__init__(stats, name, labelnames)
        self.family = Histogram(
            stats.instruments, self.name, documentation, self.labelnames, buckets
        )
        stats.add(self.family)

    def labels(self, *values: object, **named: object) -> "_Labelled":
        """Return the series with these labels, which exists from now on."""
        taken = self._take(values, named)
        self.family.declare(taken)
        return _Labelled(observe=partial(self.family.observe, taken))

    def observe(self, value: float) -> None:
        """Add an observation without labels."""
        self.family.observe(self._values, value)


class _Labelled:
    """One series, with the methods of its kind of metric."""

    def __init__(self, **calls: Any) -> None:
        vars(self).update(calls)
