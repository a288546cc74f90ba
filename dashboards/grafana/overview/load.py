"""How full the cluster is, and where its requests go."""

from cluster.metrics import catalogue as of
from dashboards.grafana.overview.now import CACHE_LIMITS
from dashboards.grafana.panels import (
    DECISIONS_PER_S,
    FORKS_PER_S,
    REPLICAS,
    REQUESTS,
    SHARE,
    THREADS,
    TOKENS_PER_S,
    AnyPanel,
    Query,
    Text,
    lines,
)
from dashboards.grafana.promql import level, mean, rate, total
from dashboards.grafana.tables import Column, table

REPLICA_URL = (
    "/d/apar-replicas/?var-replica=${__value.text}&${datasource:queryparam}&${__url_time_range}"
)


def panels() -> list[AnyPanel]:
    return [_requests(), _cache(), _replicas(), _decisions(), _threads(), _busy()]


def replica_table() -> AnyPanel:
    """A row for each replica, with a link to its panels."""
    by = ("model", "replica")
    return table(
        Text(
            "Replicas",
            "One row for each replica that reports now. A click on its id leads to its panels.",
            REPLICAS,
            24,
            6,
        ),
        {"model": "Model", "replica": "Replica"},
        [
            Column("Requests", level(of.REPLICA_REQUESTS, *by), REQUESTS),
            Column("Threads", level(of.THREADS, *by), THREADS),
            Column("KV cache", level(of.KV_CACHE_USAGE, *by), SHARE, CACHE_LIMITS, 0),
            Column("Tokens/s", rate(of.GENERATED_TOKENS, *by), TOKENS_PER_S, decimals=0),
            Column("Forks/s", rate(of.FORKS, *by), FORKS_PER_S, decimals=1),
            Column("Busy", rate(of.ENGINE_BUSY_SECONDS, *by), SHARE, decimals=0),
        ],
        sorted_by="Replica",
        links={"Replica": ("This replica", REPLICA_URL)},
    )


def _requests() -> AnyPanel:
    text = Text(
        "Requests running and queued", "Requests at replicas, and in the gateway's queue.", REQUESTS
    )
    return lines(
        text,
        Query(level(of.REQUESTS_RUNNING, "model"), "{{model}} running"),
        Query(level(of.REQUESTS_QUEUED, "model"), "{{model}} queued"),
    )


def _cache() -> AnyPanel:
    text = Text(
        "KV cache",
        "Share of the KV blocks that threads hold: mean over replicas, and the fullest.",
        SHARE,
    )
    return lines(
        text,
        Query(level(of.KV_CACHE_USAGE, "model", how="avg"), "{{model}} mean"),
        Query(level(of.KV_CACHE_USAGE, "model", how="max"), "{{model}} fullest"),
        at_least=1,
        limits=CACHE_LIMITS,
    )


def _replicas() -> AnyPanel:
    text = Text(
        "Replicas",
        "Replicas that take requests, and how many the model should have: as configured, or the "
        "autoscaler's least number.",
        REPLICAS,
    )
    return lines(
        text,
        Query(level(of.REPLICAS, "model", how="max"), "{{model}}"),
        Query(level(of.REPLICAS_WANTED, "model", how="max"), "{{model}} wanted"),
    )


def _decisions() -> AnyPanel:
    text = Text(
        "Router decisions",
        "Why a request went to its replica, a second.",
        DECISIONS_PER_S,
    )
    return lines(text, Query(rate(of.ROUTER_DECISIONS, "reason"), "{{reason}}"), stacked=True)


def _threads() -> AnyPanel:
    text = Text("Threads a request", "Threads of a finished request, on average.", THREADS)
    return lines(text, Query(mean(of.REQUEST_THREADS, "model"), "{{model}}"))


def _busy() -> AnyPanel:
    text = Text(
        "Engines busy",
        "Share of the time that engines spend in forward passes, mean over replicas.",
        SHARE,
    )
    share = total(rate(of.ENGINE_BUSY_SECONDS, "model", "replica"), "model", how="avg")
    return lines(text, Query(share, "{{model}}"), at_least=1)
