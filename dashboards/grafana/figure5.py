"""The paper's serving statistics (arXiv 2401.06761, section 3.4), live, with replicas as GPUs.

Prometheus plots over time only. The samples of the range are therefore put into classes of the
other quantity, as in the paper's measurements. A line of the paper's figure is a model here: serve
the original model beside the forking one to compare them.
"""

from dashboards.grafana.panels import (
    SECONDS,
    TOKENS,
    TOKENS_PER_S,
    AnyPanel,
    Column,
    Query,
    Text,
    Unit,
    lines,
    table,
)
from dashboards.grafana.promql import WHOLE_RANGE, level, mean, rate, ratio
from deployments.metrics import catalogue as of
from deployments.metrics.catalogue import Metric

# One sample per interval of the plots, however long the range.
SAMPLES = f"{WHOLE_RANGE}:$__interval"


def figure5() -> list[AnyPanel]:
    """Build the panels of figure 5 and of the paper's tables 2 and 1."""
    throughput = rate(of.GENERATED_TOKENS, "model")
    cache_use = level(of.KV_CACHE_USAGE, "model", how="avg")
    # A full cache is in the last class.
    by_use = classed(throughput, "kv_use", f"floor(clamp_max({cache_use}, 0.99) * 10) * 10")
    requests = level(of.REPLICA_REQUESTS, "model", how="avg")
    power = f"2 ^ floor(log2(clamp_min({requests}, 1)))"
    latency = classed(mean(of.REQUEST_LATENCY, "model"), "concurrency", power)
    per_token = ratio(rate(of.REQUEST_LATENCY, "model", series="_sum"), throughput)
    return [
        table(
            Text(
                "5a: throughput by KV usage (tokens/s)",
                "The paper's dots and error bars: mean, 25th and 75th percentile of the samples in "
                "each class of KV usage (its lower bound, in percent). A class that never occurred "
                "has no row.",
                TOKENS_PER_S,
                12,
                11,
            ),
            {"model": "Model", "kv_use": "KV usage from"},
            spread(by_use, TOKENS_PER_S, decimals=0),
            sorted_by="KV usage from",
            numbers=("kv_use",),
        ),
        table(
            Text(
                "5b: latency by concurrency",
                "Mean, 25th and 75th percentile of the samples, and latency per generated token, "
                "in each class of requests per replica (its lower bound, a power of two).",
                SECONDS,
                12,
                11,
            ),
            {"model": "Model", "concurrency": "Requests from"},
            [
                *spread(latency, SECONDS),
                Column("Per token", average(classed(per_token, "concurrency", power)), SECONDS),
            ],
            sorted_by="Requests from",
            numbers=("concurrency",),
        ),
        _forked_and_flattened(
            Text(
                "Attended tokens per token",
                "Mean tokens attended to per generated token of finished requests: forked, and "
                "flattened as in the paper's table 2 (166 and 256 on Vicuna-Bench).",
                TOKENS,
                12,
            ),
            of.ATTENDED_TOKENS,
            of.SEQUENTIAL_ATTENDED_TOKENS,
            # One thread takes a step for each token of the text.
            rate(of.SEQUENTIAL_STEPS, "model"),
        ),
        _forked_and_flattened(
            Text(
                "Peak cached tokens",
                "Mean peak of cached tokens of finished requests: forked, and flattened as in the "
                "paper's table 1 (303 and 417 on Vicuna-Bench).",
                TOKENS,
                12,
            ),
            of.CACHED_TOKENS,
            of.SEQUENTIAL_CACHED_TOKENS,
            rate(of.REQUEST_THREADS, "model", series="_count"),
        ),
    ]


def _forked_and_flattened(text: Text, forked: Metric, flattened: Metric, whole: str) -> AnyPanel:
    return lines(
        text,
        Query(ratio(rate(forked, "model"), whole), "{{model}} forked"),
        Query(ratio(rate(flattened, "model"), whole), "{{model}} flattened"),
    )


def classed(value: str, label: str, quantity: str) -> str:
    """Label a value with the current class of a quantity that has one series per model."""
    return f'count_values by (model) ("{label}", {quantity}) * on (model) group_left () ({value})'


def average(samples: str) -> str:
    """Mean of the samples in the range."""
    return f"avg_over_time(({samples})[{SAMPLES}])"


def spread(samples: str, unit: Unit, decimals: int | None = None) -> list[Column]:
    """Columns for the mean, the 25th and the 75th percentile of the samples."""
    columns = {
        "Mean": average(samples),
        "25 %": f"quantile_over_time(0.25, ({samples})[{SAMPLES}])",
        "75 %": f"quantile_over_time(0.75, ({samples})[{SAMPLES}])",
    }
    return [Column(title, each, unit, decimals=decimals) for title, each in columns.items()]
