"""Recording and alert rules, and the PromQL that they are made of.

Metrics come from the catalogue, so mypy finds a renamed one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deployments.metrics.catalogue import Kind, Metric

JOB = "apar"
"""The `job` label of every target; on Kubernetes the PodMonitors set it too."""
CLUSTER = ("cluster", "namespace")
"""Labels of targets that tell one of our clusters from another; every rule keeps them."""


class Severity(StrEnum):
    """Urgency for an operator."""

    PAGE = "page"
    """At once, also at night: users get slow service or none."""
    TICKET = "ticket"
    """During working hours."""


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """Query whose result is stored under a name of the form `labels:metric:operations`."""

    record: str
    expression: str

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as in a rule file."""
        return {"record": self.record, "expr": self.expression}


@dataclass(frozen=True, slots=True)
class AlertRule:
    """Query whose results become alerts once they have lasted `hold_s` seconds.

    `summary` and `description` are Prometheus templates; a description contains the value.
    `objective` groups the alerts of one service level objective.
    """

    name: str
    severity: Severity
    expression: str
    hold_s: float
    summary: str
    description: str
    objective: str | None = None

    def as_dict(self, runbook: str, hold_scale: float) -> dict[str, Any]:
        """Return the rule as in a rule file; `runbook` is the page with a section per alert."""
        objective = {} if self.objective is None else {"objective": self.objective}
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": duration(self.hold_s * hold_scale),
            "labels": {"severity": str(self.severity)} | objective,
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbook}#{self.name.lower()}",
            },
        }


def duration(seconds: float) -> str:
    """Format a duration for Prometheus; fractions of a second become milliseconds."""
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    whole = int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole and whole % length == 0:
            return f"{whole // length}{unit}"
    return f"{whole}s"


def selector(metric: Metric, /, **labels: str) -> str:
    """Select the series of a metric by label values; a value with `|` is a regular expression.

    Raises ValueError for a label that the metric does not have.
    """
    return f"{metric.name}{_matchers(metric, labels)}"


def by(*labels: str) -> str:
    """Return the clause that groups by cluster and labels."""
    return f"by ({', '.join((*CLUSTER, *labels))})"


def total(metric: Metric, labels: Iterable[str], /, *, how: str = "sum") -> str:
    """Aggregate a gauge over all processes of a cluster."""
    return f"{how} {_by(metric, labels)} ({selector(metric)})"


def rate(metric: Metric, window: str, labels: Iterable[str], /) -> str:
    """Increase of a counter per second, over a window."""
    return f"sum {_by(metric, labels)} (rate({selector(metric)}[{window}]))"


def growth(metric: Metric, window: str, labels: Iterable[str], /) -> str:
    """Increase of a counter in a window, extrapolated to the window's ends."""
    return f"sum {_by(metric, labels)} (increase({selector(metric)}[{window}]))"


def events(metric: Metric, window: str, labels: Iterable[str], /) -> str:
    """Count rare events in a window: `growth` as a whole number, for comparisons."""
    return f"round({growth(metric, window, labels)})"


def share_of(record: str, part: str, whole: str) -> str:
    """Ratio of two sets of outcomes in a record by model and outcome.

    `part` and `whole` are regular expressions. Without `part` the ratio is 0; without `whole`
    there is no value.
    """
    model = by("model")
    some = f'sum {model} ({record}{{outcome=~"{part}"}})'
    none = f"0 * sum {model} ({record})"
    return over(f"({some} or {none})", f'sum {model} ({record}{{outcome=~"{whole}"}})')


def quantile(share: float, metric: Metric, window: str, labels: Iterable[str], /) -> str:
    """Quantile of a histogram over a window, interpolated linearly within a bucket."""
    if metric.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{metric.name} is not a histogram")
    grouping = by(*_known(metric, labels), "le")
    return f"histogram_quantile({share:g}, sum {grouping} (rate({metric.name}_bucket[{window}])))"


def share_above(metric: Metric, bound: float, window: str, labels: Iterable[str], /) -> str:
    """Share of a histogram's observations above a bucket bound; no value without observations.

    Raises ValueError if `bound` is not a bucket bound.
    """
    if bound not in metric.buckets:
        raise ValueError(f"{bound} is not a bucket bound of {metric.name}: {metric.buckets}")
    grouping = _by(metric, labels)
    below = f'{metric.name}_bucket{{le="{float(bound)}"}}'
    return (
        f"1 - sum {grouping} (rate({below}[{window}]))\n"
        f"  / (sum {grouping} (rate({metric.name}_count[{window}])) > 0)"
    )


def over(part: str, whole: str) -> str:
    """Ratio of two expressions; no value where the divisor is 0."""
    return f"{part}\n  / ({whole} > 0)"


def _by(metric: Metric, labels: Iterable[str]) -> str:
    return by(*_known(metric, labels))


def _known(metric: Metric, labels: Iterable[str]) -> tuple[str, ...]:
    names = tuple(labels)
    if unknown := set(names) - set(metric.labels):
        raise ValueError(f"{metric.name} has no labels {sorted(unknown)}")
    return names


def _matchers(metric: Metric, labels: dict[str, str]) -> str:
    _known(metric, labels)
    pairs = [f'{name}{"=~" if "|" in value else "="}"{value}"' for name, value in labels.items()]
    return "{" + ", ".join(pairs) + "}" if pairs else ""
