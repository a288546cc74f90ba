"""PromQL expressions over the metrics of the catalogue.

Every expression selects the clusters of the dashboard's variables and aggregates to a few labels;
without that a panel would grow with the number of processes.
"""

from deployments.metrics.catalogue import Metric

RATE_WINDOW = "$__rate_interval"
"""Covers the last few scrapes."""
WHOLE_RANGE = "$__range"
"""The dashboard's time range."""

# Label to dashboard variable; vLLM's metrics call the model otherwise.
FILTERS = {"model": "$model", "model_name": "$model", "replica": "$replica"}
IN_CLUSTERS = 'cluster=~"$cluster",namespace=~"$namespace"'
"""Matchers of the selected clusters, for all series of our targets."""


def selector(metric: Metric, *matchers: str, series: str = "") -> str:
    """Select a metric's series by the dashboard's variables and `matchers`.

    `series` is the suffix of a histogram's series: `_bucket`, `_sum` or `_count`.
    """
    chosen = [f'{label}=~"{FILTERS[label]}"' for label in metric.labels if label in FILTERS]
    return f"{metric.name}{series}{{{','.join((IN_CLUSTERS, *chosen, *matchers))}}}"


def total(expression: str, *by: str, how: str = "sum") -> str:
    """Aggregate an expression with `how` over all labels but `by`."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"{how}{labels} ({expression})"


def level(metric: Metric, *by: str, matchers: tuple[str, ...] = (), how: str = "sum") -> str:
    """Aggregate a gauge."""
    return total(selector(metric, *matchers), *by, how=how)


def rate(
    metric: Metric,
    *by: str,
    matchers: tuple[str, ...] = (),
    series: str = "",
    window: str = RATE_WINDOW,
) -> str:
    """Increase of a counter per second."""
    return total(f"rate({selector(metric, *matchers, series=series)}[{window}])", *by)


def events(metric: Metric, *by: str) -> str:
    """Count rare events in the last scrapes; every counter starts at 0.

    `increase` extrapolates to the ends of the window, so that one event counts as a little more.
    """
    return total(f"round(increase({selector(metric)}[{RATE_WINDOW}]))", *by)


def ratio(part: str, whole: str) -> str:
    """Divide; yields no value instead of NaN where the divisor is 0."""
    return f"{part} / ({whole} > 0)"


def saving(used: Metric, sequential: Metric, *by: str, window: str = RATE_WINDOW) -> str:
    """Share saved by forking relative to one thread."""
    return f"1 - {ratio(rate(used, *by, window=window), rate(sequential, *by, window=window))}"


def quantile(share: float, histogram: Metric, *by: str, window: str = RATE_WINDOW) -> str:
    """Quantile over all series of a histogram; no value where nothing was observed."""
    buckets = rate(histogram, *by, "le", series="_bucket", window=window)
    # NaN, the result without observations, is not >= 0.
    return f"histogram_quantile({share}, {buckets}) >= 0"


def mean(histogram: Metric, *by: str, window: str = RATE_WINDOW) -> str:
    """Mean of a histogram's observations."""
    return ratio(
        rate(histogram, *by, series="_sum", window=window),
        rate(histogram, *by, series="_count", window=window),
    )
