"""The operator's dashboard: are the objectives met, is it fast, is it full, what is failing."""

from dashboards.grafana.board import OUR_ALERTS, Board, Row
from dashboards.grafana.panels import (
    ALERTS,
    BATCH_LINES,
    BATCHES,
    DECISIONS_PER_S,
    FORKS_PER_S,
    GATEWAYS,
    LINES_PER_S,
    LOG_LINES,
    NODES,
    REPLICAS,
    REQUESTS,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    THREADS,
    TIMES,
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
    IN_CLUSTERS,
    events,
    level,
    mean,
    quantile,
    rate,
    ratio,
    selector,
    total,
)
from deployments.metrics import catalogue as of
from deployments.metrics.catalogue import Metric

# As in dashboards/prometheus/rules/objectives.yml.
BUDGET_PERIOD = "30d"
ERROR_BUDGET = 0.001
LATENCY_BUDGET = 0.05
FIRST_TOKEN_S = 2.5
OUTPUT_TOKEN_S = 0.1
CACHE_LIMITS: Limits = ((0.85, "orange"), (0.95, "red"))
"""AparKvCacheNearlyFull fires from the red bound on."""
OUTCOME_COLOURS = {
    "ok": "green",
    "client_error": "yellow",
    "server_error": "red",
    "cancelled": "purple",
}
REPLICA_URL = (
    "/d/apar-forks/?var-replica=${__value.text}&${datasource:queryparam}&${__url_time_range}"
)


def overview() -> Board:
    """Build the overview dashboard."""
    return Board(
        uid="apar-overview",
        title="APAR / Overview",
        description="Requests, latency, load and errors of the cluster.",
        rows=(
            Row("Objectives", _objectives()),
            Row("Now", _now()),
            Row("Requests", _requests()),
            Row("Load", _load()),
            Row("Batches", _batches()),
            Row("Errors and alerts", _errors()),
            Row("Replicas and versions", [_replica_table(), _versions()]),
        ),
    )


def _objectives() -> list[AnyPanel]:
    answered = total(_gained(of.REQUESTS, "", 'outcome=~"ok|server_error|cancelled"'))
    failed = total(_gained(of.REQUESTS, "", 'outcome="server_error"'))
    return [
        _budget_left(
            "Errors",
            f"{1 - ERROR_BUDGET:g} of requests without a server error",
            "end with a server error",
            ratio(failed, answered),
            ERROR_BUDGET,
        ),
        _budget_left(
            "First token",
            f"{1 - LATENCY_BUDGET:g} of requests within {FIRST_TOKEN_S} s",
            f"wait longer than {FIRST_TOKEN_S} s for their first token",
            _slow(of.TIME_TO_FIRST_TOKEN, FIRST_TOKEN_S),
            LATENCY_BUDGET,
        ),
        _budget_left(
            "Token time",
            f"{1 - LATENCY_BUDGET:g} of requests within {OUTPUT_TOKEN_S} s",
            f"take longer than {OUTPUT_TOKEN_S} s per token of their critical path",
            _slow(of.TIME_PER_CRITICAL_PATH_TOKEN, OUTPUT_TOKEN_S),
            LATENCY_BUDGET,
        ),
        lines(
            Text(
                "Burn rate of the error budgets (1 h)",
                "How many times too fast the budgets are used up: at 1 they last exactly the "
                "month. Alerts fire at 1 over 3 days, 6 over 6 hours and 14.4 over 1 hour.",
                TIMES,
                12,
                6,
            ),
            _burn("server_errors", ERROR_BUDGET, "Errors"),
            _burn("slow_first_tokens", LATENCY_BUDGET, "First token"),
            _burn("slow_output_tokens", LATENCY_BUDGET, "Token time"),
            at_least=2,
            limits=((1.0, "orange"), (14.4, "red")),
        ),
    ]


def _budget_left(title: str, goal: str, bad: str, bad_share: str, budget: float) -> AnyPanel:
    description = (
        f"Objective: {goal}. Share of the error budget of {BUDGET_PERIOD} that is left; requests "
        f"that {bad} use it up."
    )
    return stat(
        Text(f"{title}: budget left", description, SHARE, 4, 6),
        Query(f"1 - ({bad_share}) / {budget}", ""),
        limits=((0.0, "orange"), (0.5, "green")),
        base="red",
        instant=True,
    )


def _gained(metric: Metric, series: str, *matchers: str) -> str:
    return f"increase({selector(metric, *matchers, series=series)}[{BUDGET_PERIOD}])"


def _slow(histogram: Metric, bound_s: float) -> str:
    """Share of observations above a bucket bound in the budget's period."""
    quick = total(_gained(histogram, "_bucket", f'le="{bound_s}"'))
    return f"1 - {ratio(quick, total(_gained(histogram, '_count')))}"


def _burn(objective: str, budget: float, title: str) -> Query:
    record = f'model:apar_{objective}:ratio_rate1h{{{IN_CLUSTERS},model=~"$model"}}'
    return Query(f"{total(record, 'model', how='max')} / {budget}", f"{{{{model}}}} {title}")


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
            Query(ratio(failed, ended), ""),
            limits=((0.001, "orange"), (0.01, "red")),
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
            limits=((FIRST_TOKEN_S, "orange"), (10, "red")),
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
            "Time per output token",
            "Engine time after the first token, per token of the text. Forking makes it shorter.",
            of.TIME_PER_OUTPUT_TOKEN,
        ),
        _quantiles(
            "Time per token of the critical path",
            "Engine time after the first token, per token of the longest chain of threads. "
            "A reader waits for this chain, not for the threads beside it.",
            of.TIME_PER_CRITICAL_PATH_TOKEN,
        ),
        _quantiles(
            "Longest silence of a stream",
            "Longest time between two chunks of text of a streamed answer, such as while a fork "
            "starts, a prompt is computed, or a replica is replaced.",
            of.LONGEST_SILENCE,
        ),
        _quantiles("Queue time", "Time that requests wait in the gateway's queue.", of.QUEUE_TIME),
        lines(
            Text("Tokens", "Generated tokens and prompt tokens per second.", TOKENS_PER_S),
            Query(rate(of.GENERATED_TOKENS, "model"), "{{model}} generated"),
            Query(rate(of.PROMPT_TOKENS, "model"), "{{model}} prompt"),
        ),
        lines(
            Text(
                "Requests by key class",
                "Requests finished per second, by the API key's `metrics_class`.",
                REQUESTS_PER_S,
            ),
            Query(rate(of.REQUESTS, "key_class"), "{{key_class}}"),
            stacked=True,
        ),
        lines(
            Text(
                "Tokens by key class",
                "Prompt and generated tokens of finished requests per second, by the API key's "
                "`metrics_class`.",
                TOKENS_PER_S,
            ),
            Query(rate(of.CHARGED_TOKENS, "key_class"), "{{key_class}}"),
            stacked=True,
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
                "autoscaler's minimum. Requests to unreachable ones take a slower way.",
                REPLICAS,
            ),
            Query(level(of.REPLICAS, "model", how="max"), "{{model}}"),
            Query(level(of.REPLICAS_WANTED, "model", how="max"), "{{model}} wanted"),
            Query(level(of.UNREACHABLE_REPLICAS, "model", how="max"), "{{model}} unreachable"),
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
        lines(
            Text(
                "Event loop of the gateway",
                "Delay of a timer in the gateway's event loop, which all requests share: median "
                "and 99th percentile. Many milliseconds mean that the gateway is at its limit.",
                SECONDS,
            ),
            Query(quantile(0.5, of.EVENT_LOOP_LAG), "p50"),
            Query(quantile(0.99, of.EVENT_LOOP_LAG), "p99"),
        ),
    ]


def _batches() -> list[AnyPanel]:
    return [
        lines(
            Text("Open batches", "Batches of the Batch API that have not ended.", BATCHES),
            Query(level(of.BATCHES_OPEN, "state", how="max"), "{{state}}"),
            stacked=True,
        ),
        lines(
            Text("Ended batches", "Batches that ended in the last scrapes, by outcome.", BATCHES),
            Query(events(of.BATCHES_ENDED, "outcome"), "{{outcome}}"),
        ),
        lines(
            Text(
                "Lines of batches",
                "Lines answered per second, and lines in the gateway's queue, behind all requests.",
                LINES_PER_S,
            ),
            Query(rate(of.BATCH_LINES, "outcome"), "{{outcome}}"),
            Query(level(of.BATCH_LINES_QUEUED), "queued"),
            right_axis={"B": BATCH_LINES},
        ),
    ]


def _errors() -> list[AnyPanel]:
    labels = {
        "alertname": "Alert",
        "severity": "Severity",
        "cluster": "Cluster",
        "namespace": "Namespace",
        "model": "Model",
        "alertstate": "State",
    }
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
                "Settings refused, shared state silent, log lines dropped",
                "Gateways that keep older settings because the newest ones are invalid, gateways "
                "without the state that they share, and log lines dropped in the last scrapes "
                "because a disk hung. All should be 0.",
                GATEWAYS,
                6,
            ),
            Query(level(of.SETTINGS_REFUSED, "source"), "{{source}} refused"),
            Query(level(of.SHARED_STATE_SILENT), "shared state silent"),
            Query(events(of.LOG_LINES_DROPPED), "log lines"),
            at_least=1,
            right_axis={"C": LOG_LINES},
        ),
        table(
            Text("Alerts", "Pending and firing alerts. Should be empty.", ALERTS, 24, 5),
            labels,
            [Column("Series", f"count by ({', '.join(labels)}) (ALERTS{{{OUR_ALERTS}}})", ALERTS)],
            sorted_by="State",
        ),
    ]


def _recovery(metric: Metric, name: str) -> Query:
    return Query(events(metric, "model"), f"{{{{model}}}} {name}")


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


def _versions() -> AnyPanel:
    labels = {
        "cluster": "Cluster",
        "namespace": "Namespace",
        "version": "apar-serve",
        "vllm": "vLLM",
        "ray": "Ray",
        "python": "Python",
    }
    return table(
        Text("Versions", "Nodes by the versions that they run.", NODES, 24, 4),
        labels,
        [Column("Nodes", level(of.BUILD_INFO, *labels), NODES)],
        sorted_by="Cluster",
    )
