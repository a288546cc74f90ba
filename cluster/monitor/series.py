"""Series of the cluster's metrics as they stood at one moment, and sums over their labels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.metrics import catalogue
from cluster.metrics.catalogue import Kind, Metric

GroupKey = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """One series: the page it stands on, its name, and all its labels, Ray's own included.

    Two processes that count the same thing, or the same process before and after a restart, are
    different series; only what becomes of each one by itself is a rate.
    """

    page: str
    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str:
        """A label's value; empty where the series has no such label, as in Prometheus."""
        return dict(self.labels).get(name, "")


Values = Mapping[SeriesKey, float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All series of all pages that answered at a moment.

    `at_s` is monotonic. `failures` says of each other page why it did not answer.
    """

    at_s: float
    values: Values
    pages: frozenset[str]
    failures: Mapping[str, str]


def exported_names() -> frozenset[str]:
    """The names of all our series in Prometheus, a histogram's three included."""
    names: set[str] = set()
    for metric in catalogue.metrics():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        names.update(f"{metric.exported}{suffix}" for suffix in suffixes)
    return frozenset(names)


def cumulative_names() -> frozenset[str]:
    """Of those, the names that only grow: counters, and all series of histograms."""
    gauges = {m.exported for m in catalogue.metrics() if m.kind is Kind.GAUGE}
    return exported_names() - gauges


def summed(values: Values, metric: Metric, *labels: str) -> dict[GroupKey, float]:
    """Sums of a counter or gauge over all series with the same values of the labels."""
    sums: dict[GroupKey, float] = defaultdict(float)
    for group, value in _grouped(values, metric.exported, labels):
        sums[group] += value
    return dict(sums)


def largest(values: Values, metric: Metric, *labels: str) -> dict[GroupKey, float]:
    """Largest value of a gauge in each group: for what several processes report alike."""
    found: dict[GroupKey, float] = {}
    for group, value in _grouped(values, metric.exported, labels):
        found[group] = max(value, found.get(group, value))
    return found


def total(values: Values, metric: Metric) -> float:
    """Sum of all series of a counter or gauge; 0 where there is none."""
    return sum(summed(values, metric).values())


def buckets(values: Values, metric: Metric, *labels: str) -> dict[GroupKey, dict[float, float]]:
    """A histogram's cumulative counts by upper bound, of each group."""
    found: dict[GroupKey, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for group, value in _grouped(values, f"{metric.exported}_bucket", (*labels, "le")):
        found[group[:-1]][float(group[-1])] += value
    return {group: dict(counts) for group, counts in found.items()}


def _grouped(values: Values, name: str, labels: Iterable[str]) -> Iterable[tuple[GroupKey, float]]:
    wanted = tuple(labels)
    for key, value in values.items():
        if key.name == name:
            own = dict(key.labels)
            yield tuple(own.get(label, "") for label in wanted), value


def histogram_quantile(quantile: float, buckets: Mapping[float, float]) -> float | None:
    """The value below which the share `quantile` of the observations lies; None without any.

    `buckets` maps upper bounds to cumulative counts, +Inf included. Within a bucket observations
    are taken as spread evenly, in the lowest from 0 on (where its bound is positive); what lies
    beyond the last finite bound is given as that bound. Counts taken from several pages at
    slightly different moments may shrink from one bound to the next: they are taken as equal.
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
