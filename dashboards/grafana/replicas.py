"""One row per replica: the same panels, one above the other, to see which replica is different."""

from cluster.metrics import catalogue as of
from dashboards.grafana.board import Board, Row
from dashboards.grafana.forks.cache import shared_blocks
from dashboards.grafana.forks.engine import time_per_step, tokens_a_step
from dashboards.grafana.forks.threads import FORK_COLOURS, STATE_COLOURS
from dashboards.grafana.overview.now import CACHE_LIMITS
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

HEIGHT = 7


def replicas() -> Board:
    """The same panels for each replica; in a row `$replica` is the row's."""
    return Board(
        uid="apar-replicas",
        title="APAR / Replicas",
        description="One row per replica that lives at the end of the range.",
        rows=(Row("Replica $replica", [*_moment(), *_over_time()], repeat="replica"),),
    )


def _moment() -> list[AnyPanel]:
    return [
        gauge(
            Text("KV cache", "Share of the KV blocks held.", SHARE, 3, HEIGHT),
            Query(level(of.KV_CACHE_USAGE), ""),
            maximum=1,
            limits=CACHE_LIMITS,
        ),
        lines(
            Text("Requests inside", "Requests in the replica.", REQUESTS, 4, HEIGHT),
            Query(level(of.REPLICA_REQUESTS), "requests"),
        ),
        lines(
            Text("Threads by state", "Threads of its engine.", THREADS, 6, HEIGHT),
            Query(level(of.THREADS, "state"), "{{state}}"),
            stacked=True,
            colours=STATE_COLOURS,
        ),
        lines(
            Text("Forks by outcome", "Forks a second.", FORKS_PER_S, 6, HEIGHT),
            Query(rate(of.FORKS, "outcome"), "{{outcome}}"),
            stacked=True,
            colours=FORK_COLOURS,
        ),
        lines(
            Text("Generated tokens", "By all its threads, a second.", TOKENS_PER_S, 5, HEIGHT),
            Query(rate(of.GENERATED_TOKENS), "tokens"),
        ),
    ]


def _over_time() -> list[AnyPanel]:
    return [
        lines(
            Text("KV cache over time", "Share of the KV blocks held.", SHARE, 5, HEIGHT),
            Query(level(of.KV_CACHE_USAGE), "held"),
            at_least=1,
            limits=CACHE_LIMITS,
        ),
        lines(
            Text(
                "Busy, and attention saved",
                "Share of the time in forward passes; share of the attention that forking saved.",
                SHARE,
                5,
                HEIGHT,
            ),
            Query(rate(of.ENGINE_BUSY_SECONDS), "busy"),
            Query(saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS), "saved"),
            at_least=1,
        ),
        time_per_step(span=4, height=HEIGHT),
        tokens_a_step(span=4, height=HEIGHT),
        shared_blocks(span=6, height=HEIGHT),
    ]
