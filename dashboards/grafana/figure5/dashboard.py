"""The rows of Figure 5, and the paper's reasons for it beneath."""

from cluster.metrics import catalogue as of
from cluster.metrics.catalogue import Metric
from dashboards.grafana.board import Board, Row
from dashboards.grafana.figure5 import latency, throughput
from dashboards.grafana.panels import TOKENS, AnyPanel, Query, Text, lines
from dashboards.grafana.promql import rate, ratio


def figure5() -> Board:
    """The serving statistics of the paper's section 3.4, of the requests of the range."""
    return Board(
        uid="apar-figure5",
        title="APAR / Figure 5, live",
        description="The serving statistics of the paper (arXiv 2401.06761, section 3.4), of the "
        "chosen range: a replica here is the paper's one GPU.",
        rows=(
            Row("5a: throughput with respect to the use of the KV cache", throughput.panels()),
            Row("5b: latency with respect to concurrency", latency.panels()),
            Row("Why: the paper's tables 2 and 1", [_attended(), _cached()]),
        ),
        since="now-3h",
    )


def _attended() -> AnyPanel:
    text = Text(
        "Attended tokens per token",
        "How many tokens one of the text attends to, on average over finished requests: forked, "
        "and flattened as in the paper's table 2 (there 166 against 256 on Vicuna-Bench).",
        TOKENS,
        12,
    )
    # One thread takes a step for each token of the text.
    return _beside_flattened(
        text, of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, rate(of.SEQUENTIAL_STEPS, "model")
    )


def _cached() -> AnyPanel:
    text = Text(
        "Cached tokens at the peak",
        "Tokens cached at a request's peak, on average over finished requests: forked, and "
        "flattened as in the paper's table 1 (there 303 against 417 on Vicuna-Bench).",
        TOKENS,
        12,
    )
    requests = rate(of.REQUEST_THREADS, "model", series="_count")
    return _beside_flattened(text, of.CACHED_TOKENS, of.SEQUENTIAL_CACHED_TOKENS, requests)


def _beside_flattened(text: Text, forked: Metric, flattened: Metric, whole: str) -> AnyPanel:
    return lines(
        text,
        Query(ratio(rate(forked, "model"), whole), "{{model}} forked"),
        Query(ratio(rate(flattened, "model"), whole), "{{model}} flattened"),
    )
