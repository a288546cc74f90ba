"""Figure 5 of the paper, live: throughput over KV-cache usage, latency over concurrency.

Prometheus plots over time only. The samples of the range are therefore put into classes of the
other quantity, as in the paper's measurements. A line of the paper's figure is a model here: serve
the original model beside the forking one to compare them.
"""

from dashboards.grafana import promql
from dashboards.grafana.board import Board, Row
from dashboards.grafana.panels import (
    REQUESTS,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_S,
    AnyPanel,
    Column,
    Query,
    Text,
    Unit,
    bar_row,
    lines,
    table,
)
from dashboards.grafana.promql import WHOLE_RANGE, level, rate, ratio
from deployments.metrics import catalogue as of
from deployments.metrics.catalogue import Metric

HEIGHT = 11
# One sample per interval of the plots, however long the range.
SAMPLES = f"{WHOLE_RANGE}:$__interval"

THROUGHPUT = rate(of.GENERATED_TOKENS, "model")
CACHE_USE = level(of.KV_CACHE_USAGE, "model", how="avg")
CACHE_CLASSES = tuple(range(0, 100, 10))
"""Lower bounds of KV usage in percent; each class is 10 wide."""

LATENCY = promql.mean(of.REQUEST_LATENCY, "model")
LATENCY_PER_TOKEN = ratio(rate(of.REQUEST_LATENCY, "model", series="_sum"), THROUGHPUT)
CONCURRENCY = level(of.REPLICA_REQUESTS, "model", how="avg")
CONCURRENCY_CLASSES = (0, 2, 4, 8, 16, 32, 64, 128, 256)
"""Lower bounds in requests per replica; each class ends where the next begins."""


def figure5() -> Board:
    """Build the dashboard of the paper's serving statistics (section 3.4)."""
    return Board(
        uid="apar-figure5",
        title="APAR / Figure 5, live",
        description="The serving statistics of the paper (arXiv 2401.06761, section 3.4) for the "
        "chosen range. A replica corresponds to the paper's one GPU.",
        rows=(
            Row("5a: throughput by KV-cache usage", _throughput()),
            Row("5b: latency by concurrency", _latency()),
            Row("Why: the paper's tables 2 and 1", _tokens()),
        ),
        since="now-3h",
    )


def _throughput() -> list[AnyPanel]:
    classes = (
        Query(
            # A full cache is in the last class.
            while_in(THROUGHPUT, CACHE_USE, low / 100, (low + 10) / 100 if low < 90 else None),
            f"{{{{model}}}} {low}-{low + 10} %",
        )
        for low in CACHE_CLASSES
    )
    samples = classed(THROUGHPUT, "kv_use", f"floor(clamp_max({CACHE_USE}, 0.99) * 10) * 10")
    return [
        bar_row(
            Text(
                "Throughput by KV usage (tokens/s)",
                "Mean generated tokens per second in each class of KV-cache usage. A class that "
                "never occurred has no bar.",
                TOKENS_PER_S,
                8,
                HEIGHT,
            ),
            *classes,
            decimals=0,
        ),
        table(
            Text(
                "Throughput by KV usage: spread (tokens/s)",
                "The paper's dots and error bars: mean, 25th and 75th percentile of the samples in "
                "each class of KV usage (its lower bound, in percent).",
                TOKENS_PER_S,
                8,
                HEIGHT,
            ),
            {"model": "Model", "kv_use": "KV usage from"},
            spread(samples, TOKENS_PER_S, decimals=0),
            sorted_by="KV usage from",
            numbers=("kv_use",),
        ),
        lines(
            Text(
                "Throughput and KV usage over time",
                "The samples themselves. KV usage is on the right axis.",
                TOKENS_PER_S,
                8,
                HEIGHT,
            ),
            Query(THROUGHPUT, "{{model}} throughput"),
            Query(CACHE_USE, "{{model}} KV usage"),
            right_axis={"B": SHARE},
        ),
    ]


def _latency() -> list[AnyPanel]:
    queries = []
    for low, high in zip(CONCURRENCY_CLASSES, (*CONCURRENCY_CLASSES[1:], None), strict=True):
        name = f"{low} or more" if high is None else f"{low} to {high}"
        query = Query(while_in(LATENCY, CONCURRENCY, low, high), f"{{{{model}}}} {name}")
        queries.append(query)
    return [
        bar_row(
            Text(
                "Latency by concurrency",
                "Mean end-to-end latency in each class of requests per replica. A class that never "
                "occurred has no bar.",
                SECONDS,
                8,
                HEIGHT,
            ),
            *queries,
            colour="purple",
        ),
        table(
            Text(
                "Latency by concurrency: spread",
                "Mean, 25th and 75th percentile of the samples, and latency per generated token, "
                "in each class of requests per replica (its lower bound, a power of two).",
                SECONDS,
                8,
                HEIGHT,
            ),
            {"model": "Model", "concurrency": "Requests from"},
            [
                *spread(_by_concurrency(LATENCY), SECONDS),
                Column("Per token", mean(_by_concurrency(LATENCY_PER_TOKEN)), SECONDS),
            ],
            sorted_by="Requests from",
            numbers=("concurrency",),
        ),
        lines(
            Text(
                "Latency and concurrency over time",
                "The samples themselves. Mean requests per replica are on the right axis.",
                SECONDS,
                8,
                HEIGHT,
            ),
            Query(LATENCY, "{{model}} latency"),
            Query(CONCURRENCY, "{{model}} requests"),
            right_axis={"B": REQUESTS},
        ),
    ]


def _by_concurrency(value: str) -> str:
    return classed(value, "concurrency", f"2 ^ floor(log2(clamp_min({CONCURRENCY}, 1)))")


def _tokens() -> list[AnyPanel]:
    requests = rate(of.REQUEST_THREADS, "model", series="_count")
    return [
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
            requests,
        ),
    ]


def _forked_and_flattened(text: Text, forked: Metric, flattened: Metric, whole: str) -> AnyPanel:
    return lines(
        text,
        Query(ratio(rate(forked, "model"), whole), "{{model}} forked"),
        Query(ratio(rate(flattened, "model"), whole), "{{model}} flattened"),
    )


def while_in(value: str, quantity: str, low: float, high: float | None) -> str:
    """Mean of a value over the times when the quantity was in the class [low, high)."""
    upper = "" if high is None else f" < {high}"
    return mean(f"{value} and ({quantity} >= {low}{upper})")


def classed(value: str, label: str, quantity: str) -> str:
    """Label a value with the current class of a quantity that has one series per model."""
    return f'count_values by (model) ("{label}", {quantity}) * on (model) group_left () ({value})'


def mean(samples: str) -> str:
    """Mean of the samples in the range."""
    return f"avg_over_time(({samples})[{SAMPLES}])"


def spread(samples: str, unit: Unit, decimals: int | None = None) -> list[Column]:
    """Columns for the mean, the 25th and the 75th percentile of the samples."""
    columns = {
        "Mean": mean(samples),
        "25 %": f"quantile_over_time(0.25, ({samples})[{SAMPLES}])",
        "75 %": f"quantile_over_time(0.75, ({samples})[{SAMPLES}])",
    }
    return [Column(title, each, unit, decimals=decimals) for title, each in columns.items()]
