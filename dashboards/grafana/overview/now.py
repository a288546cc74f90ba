"""The state of the cluster in seven figures."""

from cluster.metrics import catalogue as of
from dashboards.grafana.panels import (
    REPLICAS,
    REQUESTS,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    TOKENS_PER_S,
    AnyPanel,
    Limits,
    Query,
    Text,
    gauge,
    stat,
)
from dashboards.grafana.promql import level, quantile, rate, ratio, total
from dashboards.prometheus.settings import RuleSettings

HEIGHT = 5
ALERTING = RuleSettings()
CACHE_LIMITS: Limits = ((0.85, "orange"), (ALERTING.kv_cache_usage, "red"))
"""From the red bound on, an alert fires as well."""


def panels() -> list[AnyPanel]:
    return [_requests(), _errors(), _first_token(), _tokens(), _cache(), _queued(), _replicas()]


def _requests() -> AnyPanel:
    text = Text("Requests", "Requests that end, a second.", REQUESTS_PER_S, 3, HEIGHT)
    return stat(text, Query(rate(of.REQUESTS), ""))


def _errors() -> AnyPanel:
    text = Text(
        "Server errors",
        "Share of the requests that ended with a 5xx or with an error in their stream.",
        SHARE,
        3,
        HEIGHT,
    )
    ended = rate(of.REQUESTS)
    failed = rate(of.REQUESTS, matchers=('outcome="server_error"',))
    query = Query(ratio(f"({failed} or 0 * {ended})", ended), "")
    return stat(text, query, limits=((0.001, "orange"), (0.01, "red")), base="green")


def _first_token() -> AnyPanel:
    text = Text(
        "First token (p90)",
        "From a streamed request's arrival to its first text, for nine in ten.",
        SECONDS,
        3,
        HEIGHT,
    )
    query = Query(quantile(0.9, of.TIME_TO_FIRST_TOKEN), "")
    return stat(text, query, limits=((ALERTING.first_token_s, "orange"), (10, "red")), base="green")


def _tokens() -> AnyPanel:
    text = Text(
        "Generated tokens/s",
        "Tokens that all threads of all replicas generate, a second.",
        TOKENS_PER_S,
        4,
        HEIGHT,
    )
    return stat(text, Query(rate(of.GENERATED_TOKENS), ""))


def _cache() -> AnyPanel:
    text = Text(
        "KV cache",
        "Share of the KV blocks that threads hold, in the replica that is fullest.",
        SHARE,
        4,
        HEIGHT,
    )
    query = Query(level(of.KV_CACHE_USAGE, how="max"), "")
    return gauge(text, query, maximum=1, limits=CACHE_LIMITS)


def _queued() -> AnyPanel:
    text = Text(
        "Queued", "Requests that wait in the gateway for a place at a replica.", REQUESTS, 3, HEIGHT
    )
    query = Query(level(of.REQUESTS_QUEUED), "")
    return stat(text, query, limits=((1, "orange"), (100, "red")), base="green")


def _replicas() -> AnyPanel:
    text = Text("Replicas", "Replicas that take requests.", REPLICAS, 4, HEIGHT)
    # All gateways tell alike, also the old one and the new while one is replaced.
    running = total(level(of.REPLICAS, "model", how="max"))
    return stat(text, Query(running, ""), limits=((1, "green"),), base="red")
