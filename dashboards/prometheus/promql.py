"""Pieces of PromQL over metrics of the catalogue, so that a renamed one is found by mypy."""

from collections.abc import Iterable

from cluster.metrics.catalogue import Kind, Metric
from dashboards.prometheus.settings import JOB


def selector(metric: Metric, /, **labels: str) -> str:
    """The series of a metric whose labels have these values.

    Raises ValueError for a label that the metric does not have. A value with `|` is a regular
    expression.
    """
    return f"{metric.exported}{_matchers(metric, labels)}"


def rate(metric: Metric, window: str, by: Iterable[str], /, **labels: str) -> str:
    """What a counter gains each second, over a window."""
    return f"sum by ({_list(metric, by)}) (rate({selector(metric, **labels)}[{window}]))"


def growth(metric: Metric, window: str, by: Iterable[str], /, **labels: str) -> str:
    """What a counter has gained in a window, its first value included.

    A series may begin with its first event, as a restarted replica's, and `increase` sees nothing
    of a first value. So a series that was not there a window ago counts whole, if its target had
    been read before without it: else it is Prometheus that is new, and not the series.
    """
    return f"sum by ({_list(metric, by)}) ({_growth(selector(metric, **labels), window)})"


def share_of(record: str, part: str, whole: str) -> str:
    """Share that some outcomes have of others, in a record by model and outcome; 0 where none.

    `part` and `whole` are regular expressions. Nothing where there is none of the whole.
    """
    some = f'sum by (model) ({record}{{outcome=~"{part}"}})'
    none = f"0 * sum by (model) ({record})"
    return over(f"({some} or {none})", f'sum by (model) ({record}{{outcome=~"{whole}"}})')


def quantile(share: float, metric: Metric, window: str, by: Iterable[str], /) -> str:
    """A quantile of what a histogram has got in a window, straight lines within a bucket."""
    if metric.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{metric.exported} is no histogram")
    grouping = f"{_list(metric, by)}, le"
    return (
        f"histogram_quantile({share:g}, "
        f"sum by ({grouping}) (rate({metric.exported}_bucket[{window}])))"
    )


def share_above(metric: Metric, bound: float, window: str, by: Iterable[str], /) -> str:
    """Share of a histogram's values above one of its buckets' bounds; nothing without values.

    Raises ValueError for a bound that no bucket has: between two, Prometheus knows no count.
    """
    if bound not in metric.buckets:
        raise ValueError(f"{bound} is no bucket of {metric.exported}: {metric.buckets}")
    names = _list(metric, by)
    below = f'{metric.exported}_bucket{{le="{float(bound)}"}}'
    return (
        f"1 - sum by ({names}) (rate({below}[{window}]))\n"
        f"  / (sum by ({names}) (rate({metric.exported}_count[{window}])) > 0)"
    )


def over(part: str, whole: str) -> str:
    """A ratio; nothing where the whole is 0."""
    return f"{part}\n  / ({whole} > 0)"


def _growth(series: str, window: str) -> str:
    reads = f'max by (instance) (sum_over_time(up{{job="{JOB}"}}[{window}]))'
    return (
        f"({series} unless {series} offset {window}\n"
        f"  and count_over_time({series}[{window}]) < on (instance) group_left () {reads})\n"
        f"or increase({series}[{window}])"
    )


def _list(metric: Metric, by: Iterable[str]) -> str:
    names = tuple(by)
    if unknown := set(names) - set(metric.labels):
        raise ValueError(f"{metric.exported} has no labels {sorted(unknown)}")
    return ", ".join(names)


def _matchers(metric: Metric, labels: dict[str, str]) -> str:
    _list(metric, labels)
    pairs = [f'{name}{"=~" if "|" in value else "="}"{value}"' for name, value in labels.items()]
    return "{" + ", ".join(pairs) + "}" if pairs else ""
