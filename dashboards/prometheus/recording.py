"""Recording rules: rates, ratios and quantiles that alerts read, per cluster and model.

Names have the form `labels:metric:operations`, without the labels of the cluster, which all have.
Windows are chosen for a scrape interval of 15 s. Those of the objectives are in `objectives.py`.
"""

from dashboards.prometheus.rule import (
    RecordingRule,
    events,
    quantile,
    rate,
    share_of,
    total,
)
from deployments.metrics import catalogue

MODEL = ("model",)
REPLICA = ("model", "replica")

GENERATED_TOKENS = "model:apar_generated_tokens:rate1m"
KV_CACHE_USAGE = "model_replica:apar_kv_cache_usage:ratio"
THREADS = "model_state:apar_threads:sum"
FORKS = "model_outcome:apar_forks:rate5m"
FORKS_REFUSED = "model:apar_forks_refused:ratio_rate5m"
REQUESTS_RUNNING = "model:apar_requests_running:sum"
REQUESTS_QUEUED = "model:apar_requests_queued:sum"
QUEUE_TIME = "model:apar_queue_time_seconds:p90_5m"
REPLICAS = "model:apar_replicas:max"
REPLICAS_WANTED = "model:apar_replicas_wanted:max"
RESTARTS = "model:apar_replica_restarts:increase30m"
GIVEN_UP = "model:apar_given_up:increase10m"
REJECTED = "reason_key_class:apar_requests_rejected:increase10m"


def engines() -> list[RecordingRule]:
    """Tokens, threads, forks and KV caches."""
    return [
        RecordingRule(GENERATED_TOKENS, rate(catalogue.GENERATED_TOKENS, "1m", MODEL)),
        RecordingRule(KV_CACHE_USAGE, total(catalogue.KV_CACHE_USAGE, REPLICA, how="max")),
        RecordingRule(THREADS, total(catalogue.THREADS, ("model", "state"))),
        RecordingRule(FORKS, rate(catalogue.FORKS, "5m", ("model", "outcome"))),
        RecordingRule(FORKS_REFUSED, share_of(FORKS, "refused", "accepted|delayed|refused")),
    ]


def requests() -> list[RecordingRule]:
    """Requests by state, queue time and rejections."""
    return [
        RecordingRule(REQUESTS_RUNNING, total(catalogue.REQUESTS_RUNNING, MODEL)),
        RecordingRule(REQUESTS_QUEUED, total(catalogue.REQUESTS_QUEUED, MODEL)),
        RecordingRule(QUEUE_TIME, quantile(0.9, catalogue.QUEUE_TIME, "5m", MODEL)),
        RecordingRule(
            REJECTED, events(catalogue.REQUESTS_REJECTED, "10m", ("reason", "key_class"))
        ),
    ]


def faults() -> list[RecordingRule]:
    """Replicas, their restarts, and requests that were lost with them."""
    return [
        # Every gateway reports the number of replicas that it knows.
        RecordingRule(REPLICAS, total(catalogue.REPLICAS, MODEL, how="max")),
        RecordingRule(REPLICAS_WANTED, total(catalogue.REPLICAS_WANTED, MODEL, how="max")),
        RecordingRule(RESTARTS, events(catalogue.REPLICA_RESTARTS, "30m", MODEL)),
        RecordingRule(GIVEN_UP, events(catalogue.GIVEN_UP, "10m", MODEL)),
    ]
