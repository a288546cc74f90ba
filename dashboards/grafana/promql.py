"""PromQL expressions over the metrics of the catalogue.

Every expression adds series up to a few labels, so that no panel grows with the processes that
export: Ray's agents add labels of their own to each series.
"""

from cluster.metrics.catalogue import Metric

RATE_WINDOW = "$__rate_interval"
"""The last few scrapes."""
WHOLE_RANGE = "$__range"
"""What the dashboard shows."""

# Labels that the dashboards' variables choose from; those of vLLM's metrics have other names.
FILTERS = {
    "model": "$model",
    "model_name": "$model",
    "replica": "$replica",
    "ReplicaId": "$replica",
}


def selector(metric: Metric, *matchers: str, series: str = "") -> str:
    """The metric's series under the variables of the dashboard, and under `matchers`.

    `series` is the ending of a histogram's series: `_bucket`, `_sum` or `_count`.
    """
    chosen = [f'{label}=~"{FILTERS[label]}"' for label in metric.labels if label in FILTERS]
    inside = ",".join((*chosen, *matchers))
    return f"{metric.exported}{series}{{{inside}}}" if inside else f"{metric.exported}{series}"


def total(expression: str, *by: str, how: str = "sum") -> str:
    """The expression, added up (or `how` else) over all labels but `by`."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"{how}{labels} ({expression})"


def level(metric: Metric, *by: str, matchers: tuple[str, ...] = (), how: str = "sum") -> str:
    """A gauge."""
    return total(selector(metric, *matchers), *by, how=how)


def rate(
    metric: Metric,
    *by: str,
    matchers: tuple[str, ...] = (),
    series: str = "",
    window: str = RATE_WINDOW,
) -> str:
    """A counter's increase a second."""
    return total(f"rate({selector(metric, *matchers, series=series)}[{window}])", *by)


def events(metric: Metric, *by: str) -> str:
    """How often something rare happened within the last scrapes, its first time included.

    Ray exports a counter from its first increment on, which `increase` does not see: a series that
    was not there before counts whole, unless it is its target that was not scraped before.
    """
    series = selector(metric)
    before = f"offset {RATE_WINDOW}"
    born = f"{series} unless {series} {before} and on (instance) up {before} == 1"
    return total(f"({born}) or increase({series}[{RATE_WINDOW}])", *by)


def ratio(part: str, whole: str) -> str:
    """A quotient; there is none, instead of NaN, where nothing happened."""
    return f"{part} / ({whole} > 0)"


def saving(used: Metric, sequential: Metric, *by: str, window: str = RATE_WINDOW) -> str:
    """What forking saved, as a share of what one thread would have needed."""
    return f"1 - {ratio(rate(used, *by, window=window), rate(sequential, *by, window=window))}"


def quantile(share: float, histogram: Metric, *by: str, window: str = RATE_WINDOW) -> str:
    """A quantile over all series of a histogram; there is none where nothing was observed."""
    buckets = rate(histogram, *by, "le", series="_bucket", window=window)
    # Without observations it is NaN, which is not >= 0.
    return f"histogram_quantile({share}, {buckets}) >= 0"


def mean(histogram: Metric, *by: str, window: str = RATE_WINDOW) -> str:
    """The mean of what a histogram observed."""
    return ratio(
        rate(histogram, *by, series="_sum", window=window),
        rate(histogram, *by, series="_count", window=window),
    )


def zero_unless(expression: str, known: Metric, *by: str) -> str:
    """The expression, or 0 where it has no series yet and the gauge `known` has: none happened."""
    return f"{expression} or 0 * {level(known, *by)}"
