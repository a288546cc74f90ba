"""Figure 5a: throughput with respect to the use of the KV cache."""

from cluster.metrics import catalogue as of
from dashboards.grafana.figure5.classes import classed, spread, while_in
from dashboards.grafana.panels import SHARE, TOKENS_PER_S, AnyPanel, Query, Text, lines
from dashboards.grafana.promql import level, rate
from dashboards.grafana.tables import bar_row, table

HEIGHT = 11
THROUGHPUT = rate(of.GENERATED_TOKENS, "model")
CACHE_USE = level(of.KV_CACHE_USAGE, "model", how="avg")
CLASSES = tuple(range(0, 100, 10))
"""Lower bounds of KV use, in per cent; each class is 10 wide."""


def panels() -> list[AnyPanel]:
    return [_means(), _spread(), _over_time()]


def _means() -> AnyPanel:
    text = Text(
        "Throughput by KV use (tokens/s)",
        "Mean of the tokens generated a second while so much of the KV cache was in use; a class "
        "that never occurred has no bar.",
        TOKENS_PER_S,
        8,
        HEIGHT,
    )
    queries = (
        Query(
            # A full cache is in the last class.
            while_in(THROUGHPUT, CACHE_USE, low / 100, (low + 10) / 100 if low < 90 else None),
            f"{{{{model}}}} {low}-{low + 10} %",
        )
        for low in CLASSES
    )
    return bar_row(text, *queries, decimals=0)


def _spread() -> AnyPanel:
    samples = classed(THROUGHPUT, "kv_use", f"floor(clamp_max({CACHE_USE}, 0.99) * 10) * 10")
    return table(
        Text(
            "Throughput by KV use: spread (tokens/s)",
            "The paper's dots and error bars: mean, 25 % and 75 % of the samples in each class "
            "of KV use (its lower bound, in per cent).",
            TOKENS_PER_S,
            8,
            HEIGHT,
        ),
        {"model": "Model", "kv_use": "KV use from"},
        spread(samples, TOKENS_PER_S, decimals=0),
        sorted_by="KV use from",
        numbers=("kv_use",),
    )


def _over_time() -> AnyPanel:
    text = Text(
        "Throughput and KV use over time",
        "The samples themselves; the share of the KV cache is on the right.",
        TOKENS_PER_S,
        8,
        HEIGHT,
    )
    return lines(
        text,
        Query(THROUGHPUT, "{{model}} throughput"),
        Query(CACHE_USE, "{{model}} KV use"),
        right_axis={"B": SHARE},
    )
