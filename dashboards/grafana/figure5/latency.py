"""Figure 5b: end-to-end latency with respect to concurrency."""

from cluster.metrics import catalogue as of
from dashboards.grafana.figure5.classes import classed, mean, spread, while_in
from dashboards.grafana.figure5.throughput import THROUGHPUT
from dashboards.grafana.panels import REQUESTS, SECONDS, AnyPanel, Query, Text, lines
from dashboards.grafana.promql import level, rate, ratio
from dashboards.grafana.promql import mean as mean_of
from dashboards.grafana.tables import Column, bar_row, table

HEIGHT = 11
LATENCY = mean_of(of.REQUEST_LATENCY, "model")
LATENCY_PER_TOKEN = ratio(rate(of.REQUEST_LATENCY, "model", series="_sum"), THROUGHPUT)
CONCURRENCY = level(of.REPLICA_REQUESTS, "model", how="avg")
CLASSES = (0, 2, 4, 8, 16, 32, 64, 128, 256)
"""Lower bounds in requests a replica; each class ends where the next begins."""


def panels() -> list[AnyPanel]:
    return [_means(), _spread(), _over_time()]


def _means() -> AnyPanel:
    text = Text(
        "Latency by concurrency",
        "Mean end-to-end latency while a replica held so many requests, on average; a class that "
        "never occurred has no bar.",
        SECONDS,
        8,
        HEIGHT,
    )
    queries = []
    for low, high in zip(CLASSES, (*CLASSES[1:], None), strict=True):
        name = f"{low} or more" if high is None else f"{low} to {high}"
        mean_latency = while_in(LATENCY, CONCURRENCY, low, high)
        queries.append(Query(mean_latency, f"{{{{model}}}} {name}"))
    return bar_row(text, *queries, colour="purple")


def _spread() -> AnyPanel:
    return table(
        Text(
            "Latency by concurrency: spread",
            "Mean, 25 % and 75 % of the samples, and the latency per generated token, in each "
            "class of requests a replica (its lower bound, a power of two).",
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
    )


def _over_time() -> AnyPanel:
    text = Text(
        "Latency and concurrency over time",
        "The samples themselves; requests in a replica, on average, are on the right.",
        SECONDS,
        8,
        HEIGHT,
    )
    return lines(
        text,
        Query(LATENCY, "{{model}} latency"),
        Query(CONCURRENCY, "{{model}} requests"),
        right_axis={"B": REQUESTS},
    )


def _by_concurrency(value: str) -> str:
    return classed(value, "concurrency", f"2 ^ floor(log2(clamp_min({CONCURRENCY}, 1)))")
