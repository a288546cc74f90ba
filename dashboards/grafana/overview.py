"""The operator's dashboard: is the service up, is it fast, is it full, what is failing."""

from cluster.metrics import catalogue as of
from cluster.metrics.catalogue import Metric
from dashboards.grafana.board import ALERT_NAMES, Board, Row
from dashboards.grafana.panels import (
    ALERTS,
    DECISIONS_PER_S,
    FORKS_PER_S,
    GATEWAYS,
    LOG_LINES,
    REPLICAS,
    REQUESTS,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    THREADS,
    TOKENS_PER_S,
    AnyPanel,
    Column,
    Limits,
    Query,
    Text,
    gauge,
    lines,
    stat,
    table,
)
from dashboards.grafana.promql import (
    events,
    level,
    mean,
    quantile,
    rate,
    ratio,
    total,
    zero_unless,
)
from dashboards.prometheus import RuleSettings

ALERTING = RuleSettings()
CACHE_LIMITS: Limits = ((0.85, "orange"), (ALERTING.kv_cache_usage, "red"))
"""AparKvCacheNearlyFull fires from the red bound on."""
OUTCOME_COLOURS = {
    "ok": "green",
    "client_error": "yellow",
    "server_error": "red",
    "cancelled": "purple",
}
REPLICA_URL = (
    "/d/apar-replicas/?var-replica=${__value.text}&${datasource:queryparam}&${__url_time_range}"
)


def overview() -> Board:
    """Build the overview dashboard."""
    return Board(
        uid="apar-overview",
        title="APAR / Overview",
        description="Requests, latency, load and errors of the cluster.",
        rows=(
            Row("Now", _now()),
            Row("Requests", _requests()),
            Row("Load", _load()),
            Row("Errors and alerts", _errors()),
            Row("Replicas", [_replica_table()]),
        ),
    )


def _now() -> list[AnyPanel]:
    height = 5
    ended = rate(of.REQUESTS)
    failed = rate(of.REQUESTS, matchers=('outcome="server_error"',))
    # All gateways report the same number, including the old and the new one during a handover.
    replicas = total(level(of.REPLICAS, "model", how="max"))
    return [
        stat(
            Text("Requests", "Requests finished per second.", REQUESTS_PER_S, 3, height),
            Query(ended, ""),
        ),
        stat(
            Text(
                "Server errors",
                "Share of requests that ended with a 5xx or with an error in their stream.",
                SHARE,
                3,
                height,
            ),
            Query(ratio(f"({failed} or 0 * {ended})", ended), ""),
            limits=((0.001, "orange"), (0.01, "red")),
            base="green",
        ),
        stat(
            Text(
                "First token (p90)",
                "90th percentile of the time from a streamed request's arrival to its first text.",
                SECONDS,
                3,
                height,
            ),
            Query(quantile(0.9, of.TIME_TO_FIRST_TOKEN), ""),
            limits=((ALERTING.first_token_s, "orange"), (10, "red")),
            base="green",
        ),
        stat(
            Text(
                "Generated tokens/s",
                "Tokens generated per second by all threads of all replicas.",
                TOKENS_PER_S,
                4,
                height,
            ),
            Query(rate(of.GENERATED_TOKENS), ""),
        ),
        gauge(
            Text(
                "KV cache",
                "Share of KV blocks held by threads, in the fullest replica.",
                SHARE,
                4,
                height,
            ),
            Query(level(of.KV_CACHE_USAGE, how="max"), ""),
            maximum=1,
            limits=CACHE_LIMITS,
        ),
        stat(
            Text("Queued", "Requests queued in the gateway.", REQUESTS, 3, height),
            Query(level(of.REQUESTS_QUEUED), ""),
            limits=((1, "orange"), (100, "red")),
            base="green",
        ),
        stat(
            Text("Replicas", "Replicas that accept requests.", REPLICAS, 4, height),
            Query(replicas, ""),
            limits=((1, "green"),),
            base="red",
        ),
    ]


def _requests() -> list[AnyPanel]:
    return [
        lines(
            Text(
                "Requests by outcome",
                "Requests finished per second, including refused ones: 4xx are client errors, "
                "5xx are server errors. Rejections by reason are shown below.",
                REQUESTS_PER_S,
            ),
            Query(rate(of.REQUESTS, "outcome"), "{{outcome}}"),
            stacked=True,
            colours=OUTCOME_COLOURS,
        ),
        _quantiles(
            "Latency", "Time from a request's arrival to the end of its answer.", of.REQUEST_LATENCY
        ),
        _quantiles(
            "Time to first token",
            "Time from a streamed request's arrival to its first text, including queue time.",
            of.TIME_TO_FIRST_TOKEN,
        ),
        _quantiles(
            "Time per token of the critical path",
            "Engine time after the first token, per token of the longest chain of threads. "
            "A reader waits for this chain, not for the threads beside it.",
            of.TIME_PER_OUTPUT_TOKEN,
        ),
        _quantiles("Queue time", "Time that requests wait in the gateway's queue.", of.QUEUE_TIME),
        lines(
            Text("Tokens", "Generated tokens and prompt tokens per second.", TOKENS_PER_S),
            Query(rate(of.GENERATED_TOKENS, "model"), "{{model}} generated"),
            Query(rate(of.PROMPT_TOKENS, "model"), "{{model}} prompt"),
        ),
    ]


def _quantiles(title: str, description: str, histogram: Metric) -> AnyPanel:
    quantiles = (
        Query(quantile(share, histogram, "model"), f"{{{{model}}}} {name}")
        for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )
    return lines(Text(title, description, SECONDS), *quantiles)


def _load() -> list[AnyPanel]:
    busy = total(rate(of.ENGINE_BUSY_SECONDS, "model", "replica"), "model", how="avg")
    return [
        lines(
            Text(
                "Requests running and queued",
                "Requests at replicas, and requests queued in the gateway.",
                REQUESTS,
            ),
            Query(level(of.REQUESTS_RUNNING, "model"), "{{model}} running"),
            Query(level(of.REQUESTS_QUEUED, "model"), "{{model}} queued"),
        ),
        lines(
            Text(
                "KV cache",
                "Share of KV blocks held by threads: mean over replicas, and the fullest replica.",
                SHARE,
            ),
            Query(level(of.KV_CACHE_USAGE, "model", how="avg"), "{{model}} mean"),
            Query(level(of.KV_CACHE_USAGE, "model", how="max"), "{{model}} fullest"),
            at_least=1,
            limits=CACHE_LIMITS,
        ),
        lines(
            Text(
                "Replicas",
                "Replicas that accept requests, and the target: the configured number or the "
                "autoscaler's minimum.",
                REPLICAS,
            ),
            Query(level(of.REPLICAS, "model", how="max"), "{{model}}"),
            Query(level(of.REPLICAS_WANTED, "model", how="max"), "{{model}} wanted"),
        ),
        lines(
            Text("Router decisions", "Routing decisions per second, by reason.", DECISIONS_PER_S),
            Query(rate(of.ROUTER_DECISIONS, "reason"), "{{reason}}"),
            stacked=True,
        ),
        lines(
            Text("Threads per request", "Mean number of threads of finished requests.", THREADS),
            Query(mean(of.REQUEST_THREADS, "model"), "{{model}}"),
        ),
        lines(
            Text(
                "Engine utilization",
                "Share of time that engines spend in forward passes, mean over replicas.",
                SHARE,
            ),
            Query(busy, "{{model}}"),
            at_least=1,
        ),
    ]


def _errors() -> list[AnyPanel]:
    labels = {"alertname": "Alert", "severity": "Severity", "model": "Model", "alertstate": "State"}
    return [
        lines(
            Text(
                "Rejections by reason",
                "Requests per second that the gateway rejected before they reached a replica.",
                REQUESTS_PER_S,
                6,
            ),
            Query(rate(of.REQUESTS_REJECTED, "reason"), "{{reason}}"),
            stacked=True,
        ),
        lines(
            Text(
                "Rejections by key class",
                "Rejected requests per second, by the API key's `metrics_class`.",
                REQUESTS_PER_S,
                6,
            ),
            Query(rate(of.REQUESTS_REJECTED, "key_class"), "{{key_class}}"),
            stacked=True,
        ),
        lines(
            Text(
                "Recovery from lost replicas",
                "Requests retried from the start, streams continued on another replica, requests "
                "that failed, and replicas restarted, in the last scrapes.",
                REQUESTS,
                6,
            ),
            _recovery(of.RETRIES, "retried"),
            _recovery(of.MIGRATIONS, "continued"),
            _recovery(of.GIVEN_UP, "failed"),
            _recovery(of.REPLICA_RESTARTS, "replicas restarted"),
            at_least=1,
        ),
        lines(
            Text(
                "Settings refused, log lines dropped",
                "Gateways that keep older settings because the newest ones are invalid, and log "
                "lines dropped in the last scrapes because a disk hung. Both should be 0.",
                GATEWAYS,
                6,
            ),
            Query(level(of.SETTINGS_REFUSED, "source"), "{{source}} refused"),
            Query(zero_unless(events(of.LOG_LINES_DROPPED), of.SETTINGS_REFUSED), "log lines"),
            at_least=1,
            right_axis={"B": LOG_LINES},
        ),
        table(
            Text("Alerts", "Pending and firing alerts. Should be empty.", ALERTS, 24, 5),
            labels,
            [Column("Series", f"count by ({', '.join(labels)}) (ALERTS{{{ALERT_NAMES}}})", ALERTS)],
            sorted_by="State",
        ),
    ]


def _recovery(metric: Metric, name: str) -> Query:
    count = zero_unless(events(metric, "model"), of.REPLICAS, "model")
    return Query(count, f"{{{{model}}}} {name}")


def _replica_table() -> AnyPanel:
    by = ("model", "replica")
    return table(
        Text(
            "Replicas",
            "One row per replica that reports metrics now. Click an id to open its panels.",
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
