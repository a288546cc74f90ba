"""The same panels for every replica, one row each, to see which replica differs."""

from dashboards.grafana.board import Board, Row
from dashboards.grafana.forks import (
    FORK_COLOURS,
    STATE_COLOURS,
    shared_blocks,
    time_per_step,
    tokens_per_step,
)
from dashboards.grafana.overview import CACHE_LIMITS
from dashboards.grafana.panels import (
    FORKS_PER_S,
    REQUESTS,
    SHARE,
    THREADS,
    TOKENS_PER_S,
    AnyPanel,
    Query,
    Text,
    gauge,
    lines,
)
from dashboards.grafana.promql import level, rate, saving
from deployments.metrics import catalogue as of

HEIGHT = 7


def replicas() -> Board:
    """Build a dashboard with one row per replica."""
    return Board(
        uid="apar-replicas",
        title="APAR / Replicas",
        description="One row per replica alive at the end of the range.",
        rows=(Row("Replica $replica", _panels(), repeat="replica"),),
    )


def _panels() -> list[AnyPanel]:
    """Build the panels of one row, in which `$replica` is that row's replica."""
    return [
        gauge(
            Text("KV cache", "Share of KV blocks held by threads.", SHARE, 3, HEIGHT),
            Query(level(of.KV_CACHE_USAGE), ""),
            maximum=1,
            limits=CACHE_LIMITS,
        ),
        lines(
            Text(
                "Requests",
                "Requests in the replica, and those that its engine has begun; every choice of `n` "
                "counts in the engine.",
                REQUESTS,
                4,
                HEIGHT,
            ),
            Query(level(of.REPLICA_REQUESTS), "in the replica"),
            Query(level(of.ENGINE_REQUESTS, "state"), "engine: {{state}}"),
        ),
        lines(
            Text("Threads by state", "Threads of the engine.", THREADS, 6, HEIGHT),
            Query(level(of.THREADS, "state"), "{{state}}"),
            stacked=True,
            colours=STATE_COLOURS,
        ),
        lines(
            Text("Forks by outcome", "Forks per second.", FORKS_PER_S, 6, HEIGHT),
            Query(rate(of.FORKS, "outcome"), "{{outcome}}"),
            stacked=True,
            colours=FORK_COLOURS,
        ),
        lines(
            Text(
                "Generated tokens",
                "Tokens per second of all threads, and of children, counted when they end.",
                TOKENS_PER_S,
                5,
                HEIGHT,
            ),
            Query(rate(of.GENERATED_TOKENS), "all threads"),
            Query(rate(of.CHILD_TOKENS), "children"),
        ),
        lines(
            Text("KV cache over time", "Share of KV blocks held by threads.", SHARE, 5, HEIGHT),
            Query(level(of.KV_CACHE_USAGE), "held"),
            at_least=1,
            limits=CACHE_LIMITS,
        ),
        lines(
            Text(
                "Utilization and savings",
                "Share of time in forward passes; share of attended tokens saved by forking.",
                SHARE,
                5,
                HEIGHT,
            ),
            Query(rate(of.ENGINE_BUSY_SECONDS), "busy"),
            Query(saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS), "saved"),
            at_least=1,
        ),
        time_per_step(span=4, height=HEIGHT),
        tokens_per_step(span=4, height=HEIGHT),
        shared_blocks(span=6, height=HEIGHT),
    ]
