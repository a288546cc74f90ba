"""Every metric that this project exports: name, kind, unit, labels and help text.

Names follow Prometheus' conventions: base units, and `_total` for counters. vLLM's own metrics keep
their names (`vllm:...`); `VLLM` lists those that rules and dashboards use.
"""

from collections.abc import Iterator

from apar_core.metrics.engine import (
    ATTENDED_TOKENS as ATTENDED_TOKENS,
)
from apar_core.metrics.engine import (
    CACHED_TOKENS as CACHED_TOKENS,
)
from apar_core.metrics.engine import (
    CHILD_TOKENS as CHILD_TOKENS,
)
from apar_core.metrics.engine import (
    CRITICAL_PATH_STEPS as CRITICAL_PATH_STEPS,
)
from apar_core.metrics.engine import (
    DISCARDED_TOKENS as DISCARDED_TOKENS,
)
from apar_core.metrics.engine import (
    ENGINE_BUSY_SECONDS as ENGINE_BUSY_SECONDS,
)
from apar_core.metrics.engine import (
    ENGINE_REQUESTS as ENGINE_REQUESTS,
)
from apar_core.metrics.engine import (
    ENGINE_STEPS as ENGINE_STEPS,
)
from apar_core.metrics.engine import (
    FAMILY_ROWS as FAMILY_ROWS,
)
from apar_core.metrics.engine import (
    FAMILY_SAVED_BLOCKS as FAMILY_SAVED_BLOCKS,
)
from apar_core.metrics.engine import (
    FORK_DELAYS as FORK_DELAYS,
)
from apar_core.metrics.engine import (
    FORKS as FORKS,
)
from apar_core.metrics.engine import (
    GENERATED_TOKENS as GENERATED_TOKENS,
)
from apar_core.metrics.engine import (
    JOIN_TOKENS as JOIN_TOKENS,
)
from apar_core.metrics.engine import (
    JOINS as JOINS,
)
from apar_core.metrics.engine import (
    KV_BLOCKS as KV_BLOCKS,
)
from apar_core.metrics.engine import (
    KV_CACHE_USAGE as KV_CACHE_USAGE,
)
from apar_core.metrics.engine import (
    KV_COPIED_BLOCKS as KV_COPIED_BLOCKS,
)
from apar_core.metrics.engine import (
    KV_FREE_BLOCKS as KV_FREE_BLOCKS,
)
from apar_core.metrics.engine import (
    KV_RELEASED_EARLY_BLOCKS as KV_RELEASED_EARLY_BLOCKS,
)
from apar_core.metrics.engine import (
    KV_SHARED_BLOCKS as KV_SHARED_BLOCKS,
)
from apar_core.metrics.engine import (
    MODEL,
    REPLICA,
    counter,
    engine_metrics,
    gauge,
    histogram,
)
from apar_core.metrics.engine import (
    PROMPT_TOKENS as PROMPT_TOKENS,
)
from apar_core.metrics.engine import (
    REQUEST_DEPTH as REQUEST_DEPTH,
)
from apar_core.metrics.engine import (
    REQUEST_THREADS as REQUEST_THREADS,
)
from apar_core.metrics.engine import (
    SEQUENTIAL_ATTENDED_TOKENS as SEQUENTIAL_ATTENDED_TOKENS,
)
from apar_core.metrics.engine import (
    SEQUENTIAL_CACHED_TOKENS as SEQUENTIAL_CACHED_TOKENS,
)
from apar_core.metrics.engine import (
    SEQUENTIAL_STEPS as SEQUENTIAL_STEPS,
)
from apar_core.metrics.engine import (
    THREADS as THREADS,
)
from apar_core.metrics.engine import (
    Kind as Kind,
)
from apar_core.metrics.engine import (
    Metric as Metric,
)

_KEY_CLASS = {
    "key_class": "`metrics_class` of the API key; anonymous without a known key",
}
_STREAM = MODEL | {
    "forked": "yes or no; unknown if the answer broke off, for instance because its client left"
}
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

# Replicas.
REPLICA_REQUESTS = gauge("apar_replica_requests", "requests", REPLICA, "Requests in the replica.")
REPLICA_RESTARTS = counter(
    "apar_replica_restarts_total",
    "replicas",
    MODEL,
    "Replicas started to replace a lost one.",
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "apar_time_per_output_token_seconds",
    "seconds",
    REPLICA,
    _PER_TOKEN_S,
    "Time from a request's first to its last token, per token of its text after the first.",
)
TIME_PER_CRITICAL_PATH_TOKEN = histogram(
    "apar_time_per_critical_path_token_seconds",
    "seconds",
    REPLICA,
    _PER_TOKEN_S,
    "Time from a request's first to its last token, per step of its critical path after the first. "
    "Without forks, the same as the time per output token.",
)

# Gateways.
REQUESTS = counter(
    "apar_requests_total",
    "requests",
    MODEL
    | _KEY_CLASS
    | {
        "outcome": "ok; client_error (4xx); server_error (5xx, or an error in the stream); "
        "cancelled: the client disconnected, or the server shut down before the end"
    },
    "Finished completion requests, including those that the gateway rejected and the lines of "
    "batches, which count once they are answered. The model is "
    "`unknown` if the request names no served model or was rejected before its model was read.",
)
CHARGED_TOKENS = counter(
    "apar_charged_tokens_total",
    "tokens",
    MODEL | _KEY_CLASS | {"kind": "prompt; generated: by all threads, also of cancelled requests"},
    "Tokens of finished requests, by who asked for them.",
)
REQUESTS_RUNNING = gauge("apar_requests_running", "requests", MODEL, "Requests at replicas.")
REQUESTS_QUEUED = gauge(
    "apar_requests_queued",
    "requests",
    MODEL,
    "Requests in the gateway's queue, without lines of batches.",
)
REQUESTS_REJECTED = counter(
    "apar_requests_rejected_total",
    "requests",
    {
        "reason": "authentication; key_limit: a rate limit or `max_threads` of the key; budget: "
        "a daily or monthly budget of the key; forbidden: the key is no admin's, or a web page "
        "of another origin sent a form; overloaded: the queue is full, or request bodies take "
        "too much memory; queue_timeout; deadline: a deadline of the request could not be met; "
        "body_timeout; invalid; too_large: body or prompt; unknown_model; unknown_route; "
        "no_replica: no replica accepted it in time; draining: the server is shutting down",
    }
    | _KEY_CLASS,
    "Requests of any kind that the gateway rejected before they reached a replica.",
)
BATCHES_OPEN = gauge(
    "apar_batches_open",
    "batches",
    {"state": "validating; in_progress; finalizing; cancelling"},
    "Batches of the Batch API that have not ended, of all gateways and keys.",
    same_everywhere=True,
)
BATCHES_ENDED = counter(
    "apar_batches_ended_total",
    "batches",
    {"outcome": "completed; failed: its input is invalid; expired; cancelled"},
    "Batches that have ended.",
)
BATCH_LINES = counter(
    "apar_batch_lines_total",
    "lines",
    _KEY_CLASS | {"outcome": "completed; failed: in the error file"},
    "Lines of batches whose result is stored.",
)
BATCH_LINES_QUEUED = gauge(
    "apar_batch_lines_queued",
    "lines",
    MODEL,
    "Lines of batches in the gateway's queue, behind all other requests.",
)
TIME_TO_FIRST_TOKEN = histogram(
    "apar_time_to_first_token_seconds",
    "seconds",
    MODEL,
    _LATENCY_S,
    "Time from a streamed request's arrival to the first chunk of its answer.",
)
TIME_TO_CERTAIN_TOKEN = histogram(
    "apar_time_to_certain_token_seconds",
    "seconds",
    _STREAM,
    _LATENCY_S,
    "Time from a streamed request's arrival until a token of its text is certain, because "
    "all text before it is complete: the mean over the request's tokens.",
)
LONGEST_SILENCE = histogram(
    "apar_longest_silence_seconds",
    "seconds",
    _STREAM,
    _LATENCY_S,
    "Longest time between two chunks of a stream with text, which includes the loss of a replica.",
)
REQUEST_LATENCY = histogram(
    "apar_request_latency_seconds",
    "seconds",
    MODEL,
    _LATENCY_S,
    "Time from a successful request's arrival to the end of its answer, without lines of batches.",
)
QUEUE_TIME = histogram(
    "apar_queue_time_seconds",
    "seconds",
    MODEL,
    _LATENCY_S,
    "Time that requests wait in the gateway's queue, without lines of batches.",
)
RETRIES = counter(
    "apar_retries_total",
    "requests",
    MODEL,
    "Requests retried from the start after their replica was lost.",
)
MIGRATIONS = counter(
    "apar_migrations_total",
    "requests",
    MODEL,
    "Streams continued on another replica after theirs was lost.",
)
GIVEN_UP = counter(
    "apar_given_up_total",
    "requests",
    MODEL,
    "Requests that failed because their replica was lost.",
)
ROUTER_DECISIONS = counter(
    "apar_router_decisions_total",
    "decisions",
    MODEL | {"reason": "affinity; least_load; only_one; full"},
    "Routing decisions, including attempts repeated while all replicas are full.",
)
UNREACHABLE_REPLICAS = gauge(
    "apar_unreachable_replicas",
    "replicas",
    MODEL,
    "Replicas to which a gateway cannot open connections of its own: their requests go through Ray "
    "Serve's handle, which costs more. It tries again after 1 s, later up to 300 s.",
)
REPLICAS = gauge(
    "apar_replicas",
    "replicas",
    MODEL,
    "Replicas that accept requests, as known to each gateway.",
    same_everywhere=True,
)
REPLICAS_WANTED = gauge(
    "apar_replicas_wanted",
    "replicas",
    MODEL,
    "Wanted replicas of the model: the configured number, or the autoscaler's minimum.",
    same_everywhere=True,
)
SHARED_STATE_SILENT = gauge(
    "apar_shared_state_silent",
    "gateways",
    {},
    "1 while the state that several gateways share does not answer, so that this gateway uses an "
    "equal part of all slots, else 0.",
)
SETTINGS_REFUSED = gauge(
    "apar_settings_refused",
    "settings",
    {"source": "keys_file; user_config: settings that Ray Serve passes to the running gateway"},
    "1 while a gateway has not fully applied the newest settings from this source, else 0.",
)

EVENT_LOOP_LAG = histogram(
    "apar_event_loop_lag_seconds",
    "seconds",
    {},
    _LAG_S,
    "Delay of a timer in a gateway's event loop, which all requests share. Ten samples a second.",
)

# Every process that writes a log.
LOG_LINES_DROPPED = counter(
    "apar_log_lines_dropped_total",
    "lines",
    {},
    "Log lines that a gateway or replica dropped because the disk hung.",
)

# Every node.
BUILD_INFO = gauge(
    "apar_build_info",
    "nodes",
    {
        "version": "of this project",
        "vllm": "version of vLLM",
        "ray": "version of Ray",
        "python": "version of Python",
    },
    "1 for each node that serves metrics, with the versions that it runs.",
)


def metrics() -> Iterator[Metric]:
    """Yield all metrics of this project: those of engines, then the others in the order above."""
    own = (value for value in globals().values() if isinstance(value, Metric))
    for metric in dict.fromkeys((*engine_metrics(), *own)):
        if metric not in VLLM:
            yield metric


_ENGINE = {"model_name": "public name of the model", "replica": "id of the replica"}
PREEMPTIONS = counter(
    "vllm:num_preemptions_total",
    "preemptions",
    _ENGINE,
    "Threads preempted to free their KV blocks.",
)
PREFIX_CACHE_QUERIES = counter(
    "vllm:prefix_cache_queries_total",
    "tokens",
    _ENGINE,
    "Prompt tokens looked up in the prefix cache.",
)
PREFIX_CACHE_HITS = counter(
    "vllm:prefix_cache_hits_total",
    "tokens",
    _ENGINE,
    "Prompt tokens found in the prefix cache.",
)
VLLM = (PREEMPTIONS, PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS)
"""vLLM's metrics that rules and dashboards use; the page adds the label `replica`."""
