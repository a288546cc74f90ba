"""Recording rules: per-model rates, ratios and quantiles for alerts and ad-hoc queries.

Names have the form `labels:metric:operations`. Except for the objectives, windows are chosen for a
scrape interval of 15 s.
"""

from cluster.metrics import catalogue
from cluster.metrics.catalogue import Metric
from dashboards.prometheus.rule import (
    RecordingRule,
    growth,
    over,
    quantile,
    rate,
    selector,
    share_of,
)

MODEL = ("model",)
REPLICA = ("model", "replica")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

GENERATED_TOKENS = "model:apar_generated_tokens:rate1m"
KV_CACHE_USAGE = "model:apar_kv_cache_usage:ratio"
REPLICA_KV_CACHE_USAGE = "model_replica:apar_kv_cache_usage:ratio"
THREADS = "model_state:apar_threads:sum"
FORKS = "model_outcome:apar_forks:rate5m"
FORKS_REFUSED = "model:apar_forks_refused:ratio_rate5m"
REQUESTS_RUNNING = "model:apar_requests_running:sum"
REQUESTS_QUEUED = "model:apar_requests_queued:sum"
REPLICAS = "model:apar_replicas:max"
REPLICAS_WANTED = "model:apar_replicas_wanted:max"
RESTARTS = "model:apar_replica_restarts:increase30m"
GIVEN_UP = "model:apar_given_up:increase10m"
REJECTED = "reason_key_class:apar_requests_rejected:increase10m"


def latency_quantile(metric: Metric, name: str) -> str:
    """Name of the record of a quantile: `p50`, `p90` or `p99`."""
    return f"model:{metric.name}:{name}_5m"


def throughput() -> list[RecordingRule]:
    """Tokens and requests per second, and utilization of the engines."""
    steps = rate(catalogue.ENGINE_STEPS, "1m", REPLICA)
    busy = rate(catalogue.ENGINE_BUSY_SECONDS, "1m", REPLICA)
    return [
        RecordingRule(GENERATED_TOKENS, rate(catalogue.GENERATED_TOKENS, "1m", MODEL)),
        RecordingRule(
            "model_replica:apar_generated_tokens:rate1m",
            rate(catalogue.GENERATED_TOKENS, "1m", REPLICA),
        ),
        RecordingRule(
            "model:apar_prompt_tokens:rate1m", rate(catalogue.PROMPT_TOKENS, "1m", MODEL)
        ),
        RecordingRule(
            "model_outcome:apar_requests:rate5m",
            rate(catalogue.REQUESTS, "5m", ("model", "outcome")),
        ),
        RecordingRule("model_replica:apar_engine_busy:ratio_rate1m", busy),
        RecordingRule("model_replica:apar_engine_step_seconds:mean_rate1m", over(busy, steps)),
    ]


def savings() -> list[RecordingRule]:
    """Savings by forking, over finished requests."""
    return [
        RecordingRule(
            "model:apar_attended_tokens_saved:ratio_rate5m",
            "1 - " + _ratio(catalogue.ATTENDED_TOKENS, catalogue.SEQUENTIAL_ATTENDED_TOKENS),
        ),
        RecordingRule(
            "model:apar_max_cached_tokens_saved:ratio_rate5m",
            "1 - " + _ratio(catalogue.CACHED_TOKENS, catalogue.SEQUENTIAL_CACHED_TOKENS),
        ),
        RecordingRule(
            "model:apar_critical_path:ratio_rate5m",
            _ratio(catalogue.CRITICAL_PATH_STEPS, catalogue.SEQUENTIAL_STEPS),
        ),
    ]


def kv_cache() -> list[RecordingRule]:
    """Usage of the KV caches; blocks that forks share, copy and release early."""
    free, blocks = _sum(catalogue.KV_FREE_BLOCKS), _sum(catalogue.KV_BLOCKS)
    moved = (
        catalogue.KV_SHARED_BLOCKS,
        catalogue.KV_COPIED_BLOCKS,
        catalogue.KV_RELEASED_EARLY_BLOCKS,
    )
    return [
        RecordingRule(KV_CACHE_USAGE, "1 - " + over(free, blocks)),
        RecordingRule(
            REPLICA_KV_CACHE_USAGE,
            f"max by (model, replica) ({selector(catalogue.KV_CACHE_USAGE)})",
        ),
        *(
            RecordingRule(
                f"model:{metric.name.removesuffix('_total')}:rate5m", rate(metric, "5m", MODEL)
            )
            for metric in moved
        ),
    ]


def forks() -> list[RecordingRule]:
    """Outcomes of forks, and threads."""
    return [
        RecordingRule(FORKS, rate(catalogue.FORKS, "5m", ("model", "outcome"))),
        RecordingRule(FORKS_REFUSED, share_of(FORKS, "refused", "accepted|delayed|refused")),
        RecordingRule(THREADS, f"sum by (model, state) ({selector(catalogue.THREADS)})"),
        *_quantiles(catalogue.REQUEST_THREADS),
    ]


def requests() -> list[RecordingRule]:
    """Requests by state, latencies, rejections and routing decisions."""
    latencies = (
        catalogue.TIME_TO_FIRST_TOKEN,
        catalogue.TIME_PER_OUTPUT_TOKEN,
        catalogue.REQUEST_LATENCY,
        catalogue.QUEUE_TIME,
    )
    return [
        RecordingRule(REQUESTS_RUNNING, _sum(catalogue.REQUESTS_RUNNING)),
        RecordingRule(REQUESTS_QUEUED, _sum(catalogue.REQUESTS_QUEUED)),
        *(rule for metric in latencies for rule in _quantiles(metric)),
        RecordingRule(
            REJECTED, growth(catalogue.REQUESTS_REJECTED, "10m", ("reason", "key_class"))
        ),
        RecordingRule(
            "model_reason:apar_router_decisions:rate5m",
            rate(catalogue.ROUTER_DECISIONS, "5m", ("model", "reason")),
        ),
    ]


def faults() -> list[RecordingRule]:
    """Replicas, their restarts, and requests affected by lost replicas."""
    return [
        # Every gateway reports the number of replicas that it knows.
        RecordingRule(REPLICAS, f"max by (model) ({selector(catalogue.REPLICAS)})"),
        RecordingRule(REPLICAS_WANTED, f"max by (model) ({selector(catalogue.REPLICAS_WANTED)})"),
        RecordingRule(RESTARTS, growth(catalogue.REPLICA_RESTARTS, "30m", MODEL)),
        RecordingRule(GIVEN_UP, growth(catalogue.GIVEN_UP, "10m", MODEL)),
        RecordingRule("model:apar_retries:increase10m", growth(catalogue.RETRIES, "10m", MODEL)),
        RecordingRule(
            "model:apar_migrations:increase10m", growth(catalogue.MIGRATIONS, "10m", MODEL)
        ),
    ]


def _sum(metric: Metric) -> str:
    return f"sum by (model) ({selector(metric)})"


def _ratio(part: Metric, whole: Metric) -> str:
    return over(rate(part, "5m", MODEL), rate(whole, "5m", MODEL))


def _quantiles(metric: Metric) -> list[RecordingRule]:
    return [
        RecordingRule(latency_quantile(metric, name), quantile(share, metric, "5m", MODEL))
        for name, share in QUANTILES.items()
    ]
