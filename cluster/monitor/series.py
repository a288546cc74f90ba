"""Snapshots of the cluster's metrics, aggregation over labels, and histogram quantiles."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind, Metric

GroupKey = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """Identity of a series: its metrics page, name and all labels.

    A replica before and after a restart has different series. Rates are computed per series and
    then summed.
    """

    page: str
    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str:
        """Return a label's value; empty if the series lacks the label, as in Prometheus."""
        return dict(self.labels).get(name, "")


Values = Mapping[SeriesKey, float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All series of all pages that answered.

    `at_s` is monotonic. `failures` maps the other pages to the reason of their failure.
    """

    at_s: float
    values: Values
    pages: frozenset[str]
    failures: Mapping[str, str]


def exported_names() -> frozenset[str]:
    """Names of all our series in Prometheus, including the three of each histogram."""
    names: set[str] = set()
    for metric in catalogue.metrics():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        names.update(f"{metric.name}{suffix}" for suffix in suffixes)
    return frozenset(names)


def cumulative_names() -> frozenset[str]:
    """Names of our cumulative series: counters, and all series of histograms."""
    gauges = {m.name for m in catalogue.metrics() if m.kind is Kind.GAUGE}
    return exported_names() - gauges


def summed(values: Values, metric: Metric, *labels: str) -> dict[GroupKey, float]:
    """Sum a counter or gauge by labels."""
    sums: dict[GroupKey, float] = defaultdict(float)
    for group, value in _grouped(values, metric.name, labels):
        sums[group] += value
    return dict(sums)


def largest(values: Values, metric: Metric, *labels: str) -> dict[GroupKey, float]:
    """Maximum of a gauge by labels, for gauges that several processes report equally."""
    found: dict[GroupKey, float] = {}
    for group, value in _grouped(values, metric.name, labels):
        found[group] = max(value, found.get(group, value))
    return found


def total(values: Values, metric: Metric) -> float:
    """Sum all series of a counter or gauge; 0 if there are none."""
    return sum(summed(values, metric).values())


def buckets(values: Values, metric: Metric, *labels: str) -> dict[GroupKey, dict[float, float]]:
    """Cumulative counts of a histogram by upper bound, grouped by labels."""
    found: dict[GroupKey, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for group, value in _grouped(values, f"{metric.name}_bucket", (*labels, "le")):
        found[group[:-1]][float(group[-1])] += value
    return {group: dict(counts) for group, counts in found.items()}


def _grouped(values: Values, name: str, labels: Iterable[str]) -> Iterable[tuple[GroupKey, float]]:
    wanted = tuple(labels)
    for key, value in values.items():
        if key.name == name:
            own = dict(key.labels)
            yield tuple(own.get(label, "") for label in wanted), value


def histogram_quantile(quantile: float, buckets: Mapping[float, float]) -> float | None:
    """Return a quantile as Prometheus' `histogram_quantile` does; None without observations.

    `buckets` maps upper bounds to cumulative counts, including +Inf. Values are interpolated
    linearly within a bucket; the lowest bucket starts at 0 if its bound is positive. Quantiles
    beyond the last finite bound return that bound. Counts from pages read at slightly different
    times may decrease between bounds; they are made monotonic.
    """
    bounds = sorted(buckets)
    if not bounds or not math.isinf(bounds[-1]):
        return None
    counts: list[float] = []
    for bound in bounds:
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    if counts[-1] <= 0:
        return None
    rank = quantile * counts[-1]
    index = next(place for place, count in enumerate(counts) if count >= rank)
    if math.isinf(bounds[index]):
        return bounds[index - 1] if index > 0 else None
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    lower = bounds[index - 1] if index > 0 else 0.0
    below = counts[index - 1] if index > 0 else 0.0
    inside = counts[index] - below
    share = (rank - below) / inside if inside > 0 else 1.0
    return lower + (bounds[index] - lower) * share
