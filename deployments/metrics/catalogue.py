"""Every metric that this project exports: name, kind, unit, labels and help text.

Names follow Prometheus' conventions: base units, and `_total` for counters. vLLM's own metrics keep
their names (`vllm:...`); `VLLM` lists those that rules and dashboards use.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """Metric type in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; a histogram's series add `_bucket`, `_sum` and `_count` to its name.

    `labels` maps each label to a description of its values; the configuration or the code bounds
    their number. `buckets` are the upper bounds of a histogram, in its unit. A gauge that is
    `same_everywhere` has one value that several processes report.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: dict[str, str] = field(hash=False)
    buckets: tuple[float, ...] = ()
    same_everywhere: bool = False


_MODEL = {"model": "public name of the model"}
_KEY_CLASS = {
    "key_class": "`metrics_class` of the API key; anonymous without a known key",
}
_STREAM = _MODEL | {
    "forked": "yes or no; unknown if the answer broke off, for instance because its client left"
}
_REPLICA = _MODEL | {"replica": "id of the replica; changes with every start"}
_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_THREADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_DEPTHS = (0, 1, 2, 3, 4, 6, 8)


def _counter(name: str, unit: str, labels: dict[str, str], text: str) -> Metric:
    return Metric(name, Kind.COUNTER, unit, text, labels)


def _gauge(
    name: str, unit: str, labels: dict[str, str], text: str, *, same_everywhere: bool = False
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, text, labels, same_everywhere=same_everywhere)


def _histogram(
    name: str, unit: str, labels: dict[str, str], buckets: tuple[float, ...], text: str
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, text, labels, buckets)


# Current state of a replica's engine.
KV_BLOCKS = _gauge("apar_kv_blocks", "blocks", _REPLICA, "KV blocks in the engine's cache.")
KV_FREE_BLOCKS = _gauge("apar_kv_free_blocks", "blocks", _REPLICA, "Free KV blocks.")
KV_CACHE_USAGE = _gauge(
    "apar_kv_cache_usage_ratio", "ratio", _REPLICA, "Share of KV blocks held by threads."
)
THREADS = _gauge(
    "apar_threads",
    "threads",
    _REPLICA
    | {
        "state": "running; resting: misses steps to keep to a time per token; waiting for the "
        "scheduler; deferred: a fork held back by a cap"
    },
    "Threads in the engine, by state.",
)
REPLICA_REQUESTS = _gauge("apar_replica_requests", "requests", _REPLICA, "Requests in the replica.")

# Counters of a replica's engine since its start.
FORKS = _counter(
    "apar_forks_total",
    "forks",
    _REPLICA
    | {
        "outcome": "accepted at once; delayed by a cap and started later; refused because of a "
        "limit of the request or the model's context, or where a list would lower the throughput"
    },
    "Forks requested by models, by outcome.",
)
FORK_DELAYS = _counter(
    "apar_fork_delays_total",
    "forks",
    _REPLICA
    | {"reason": "request, key or replica: the cap on its threads; policy: the fork policy"},
    "Delayed forks, by the first reason for the delay.",
)
KV_SHARED_BLOCKS = _counter(
    "apar_kv_shared_blocks_total",
    "blocks",
    _REPLICA,
    "KV blocks that parents shared with children.",
)
KV_COPIED_BLOCKS = _counter(
    "apar_kv_copied_blocks_total", "blocks", _REPLICA, "Partially filled KV blocks copied at forks."
)
KV_RELEASED_EARLY_BLOCKS = _counter(
    "apar_kv_released_early_blocks_total",
    "blocks",
    _REPLICA,
    "KV blocks released by threads that ended before their request.",
)
FAMILY_ROWS = _counter(
    "apar_family_rows_total",
    "rows",
    _REPLICA,
    "Decoding rows read together with others of their family (`attention: family`). Counted where "
    "the worker runs in the engine core's process, as on one GPU.",
)
FAMILY_SAVED_BLOCKS = _counter(
    "apar_family_saved_blocks_total",
    "blocks",
    _REPLICA,
    "KV block reads per layer that were not needed, because a family's blocks are read once.",
)
JOINS = _counter(
    "apar_joins_total",
    "joins",
    _REPLICA,
    "Threads that continued after the texts of children for which they had waited.",
)
JOIN_TOKENS = _counter(
    "apar_join_tokens_total",
    "tokens",
    _REPLICA | {"outcome": "reused: found in the KV cache; computed: most of them once more"},
    "Tokens before threads that continued after their children's texts.",
)
DISCARDED_TOKENS = _counter(
    "apar_discarded_tokens_total",
    "tokens",
    _REPLICA,
    "Generated tokens that are no part of any text: list items after the end of their list.",
)
REPLICA_RESTARTS = _counter(
    "apar_replica_restarts_total",
    "replicas",
    _MODEL,
    "Replicas started to replace a lost one.",
)
ENGINE_STEPS = _counter("apar_engine_steps_total", "steps", _REPLICA, "Forward passes.")
ENGINE_BUSY_SECONDS = _counter(
    "apar_engine_busy_seconds_total", "seconds", _REPLICA, "Time spent in forward passes."
)

GENERATED_TOKENS = _counter(
    "apar_generated_tokens_total",
    "tokens",
    _REPLICA,
    "Tokens generated by all threads, counted as they are generated: text, fork and end tokens.",
)

# Requests finished by a replica's engine: sums of the `apar` fields of their answers, and the same
# counts for requests that may not fork. A cancelled request counts with what it had generated. Not
# counted: beam search, and several choices (`n` > 1) of a checkpoint without control tokens. A
# request continued on another replica counts there, as a whole.
PROMPT_TOKENS = _counter(
    "apar_prompt_tokens_total", "tokens", _REPLICA, "Prompt tokens of finished requests."
)
ATTENDED_TOKENS = _counter(
    "apar_attended_tokens_total",
    "tokens",
    _REPLICA,
    "Attended tokens, summed over generated tokens (paper, section 3.4).",
)
SEQUENTIAL_ATTENDED_TOKENS = _counter(
    "apar_sequential_attended_tokens_total",
    "tokens",
    _REPLICA,
    "Attended tokens that a single thread would have needed for the same text.",
)
CACHED_TOKENS = _counter(
    "apar_max_cached_tokens_total",
    "tokens",
    _REPLICA,
    "Peak number of cached tokens of a request, summed over requests.",
)
SEQUENTIAL_CACHED_TOKENS = _counter(
    "apar_sequential_max_cached_tokens_total",
    "tokens",
    _REPLICA,
    "Peak number of cached tokens with a single thread, summed over requests.",
)
CRITICAL_PATH_STEPS = _counter(
    "apar_critical_path_steps_total",
    "steps",
    _REPLICA,
    "Decode steps until a request's last thread ends, summed over requests.",
)
SEQUENTIAL_STEPS = _counter(
    "apar_sequential_steps_total",
    "steps",
    _REPLICA,
    "Decode steps that a single thread would have needed, summed over requests.",
)
REQUEST_THREADS = _histogram(
    "apar_request_threads",
    "threads",
    _REPLICA,
    _THREADS,
    "Number of threads of a finished request.",
)
REQUEST_DEPTH = _histogram(
    "apar_request_tree_depth",
    "levels",
    _REPLICA,
    _DEPTHS,
    "Depth of a finished request's paragraph tree.",
)

TIME_PER_OUTPUT_TOKEN = _histogram(
    "apar_time_per_output_token_seconds",
    "seconds",
    _REPLICA,
    _PER_TOKEN_S,
    "Time from a request's first to its last token, per token of its text after the first.",
)
TIME_PER_CRITICAL_PATH_TOKEN = _histogram(
    "apar_time_per_critical_path_token_seconds",
    "seconds",
    _REPLICA,
    _PER_TOKEN_S,
    "Time from a request's first to its last token, per step of its critical path after the first. "
    "Without forks, the same as the time per output token.",
)

# Gateways.
REQUESTS = _counter(
    "apar_requests_total",
    "requests",
    _MODEL
    | _KEY_CLASS
    | {
        "outcome": "ok; client_error (4xx); server_error (5xx, or an error in the stream); "
        "cancelled: the client disconnected, or the server shut down before the end"
    },
    "Finished completion requests, including those that the gateway rejected. The model is "
    "`unknown` if the request names no served model or was rejected before its model was read.",
)
CHARGED_TOKENS = _counter(
    "apar_charged_tokens_total",
    "tokens",
    _MODEL | _KEY_CLASS | {"kind": "prompt; generated: by all threads, also of cancelled requests"},
    "Tokens of finished requests, by who asked for them.",
)
REQUESTS_RUNNING = _gauge("apar_requests_running", "requests", _MODEL, "Requests at replicas.")
REQUESTS_QUEUED = _gauge(
    "apar_requests_queued", "requests", _MODEL, "Requests in the gateway's queue."
)
REQUESTS_REJECTED = _counter(
    "apar_requests_rejected_total",
    "requests",
    {
        "reason": "authentication; key_limit: a rate limit or `max_threads` of the key; budget: "
        "a daily or monthly budget of the key; forbidden: the key is no admin's; overloaded: the "
        "queue is full, or request bodies take too much memory; queue_timeout; deadline: a "
        "deadline of the request could not be met; body_timeout; invalid; too_large: body or "
        "prompt; unknown_model; unknown_route; no_replica: no replica accepted it in time; "
        "draining: the server is shutting down",
    }
    | _KEY_CLASS,
    "Requests of any kind that the gateway rejected before they reached a replica.",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "apar_time_to_first_token_seconds",
    "seconds",
    _MODEL,
    _LATENCY_S,
    "Time from a streamed request's arrival to the first chunk of its answer.",
)
TIME_TO_CERTAIN_TOKEN = _histogram(
    "apar_time_to_certain_token_seconds",
    "seconds",
    _STREAM,
    _LATENCY_S,
    "Time from a streamed request's arrival until a token of its text is certain, because "
    "all text before it is complete: the mean over the request's tokens.",
)
LONGEST_SILENCE = _histogram(
    "apar_longest_silence_seconds",
    "seconds",
    _STREAM,
    _LATENCY_S,
    "Longest time between two chunks of a stream with text, which includes the loss of a replica.",
)
REQUEST_LATENCY = _histogram(
    "apar_request_latency_seconds",
    "seconds",
    _MODEL,
    _LATENCY_S,
    "Time from a successful request's arrival to the end of its answer.",
)
QUEUE_TIME = _histogram(
    "apar_queue_time_seconds",
    "seconds",
    _MODEL,
    _LATENCY_S,
    "Time that requests wait in the gateway's queue.",
)
RETRIES = _counter(
    "apar_retries_total",
    "requests",
    _MODEL,
    "Requests retried from the start after their replica was lost.",
)
MIGRATIONS = _counter(
    "apar_migrations_total",
    "requests",
    _MODEL,
    "Streams continued on another replica after theirs was lost.",
)
GIVEN_UP = _counter(
    "apar_given_up_total",
    "requests",
    _MODEL,
    "Requests that failed because their replica was lost.",
)
ROUTER_DECISIONS = _counter(
    "apar_router_decisions_total",
    "decisions",
    _MODEL | {"reason": "affinity; least_load; only_one; full"},
    "Routing decisions, including attempts repeated while all replicas are full.",
)
UNREACHABLE_REPLICAS = _gauge(
    "apar_unreachable_replicas",
    "replicas",
    _MODEL,
    "Replicas to which a gateway cannot open connections of its own: their requests go through Ray "
    "Serve's handle, which costs more. It tries again after 1 s, later up to 300 s.",
)
REPLICAS = _gauge(
    "apar_replicas",
    "replicas",
    _MODEL,
    "Replicas that accept requests, as known to each gateway.",
    same_everywhere=True,
)
REPLICAS_WANTED = _gauge(
    "apar_replicas_wanted",
    "replicas",
    _MODEL,
    "Wanted replicas of the model: the configured number, or the autoscaler's minimum.",
    same_everywhere=True,
)
SHARED_STATE_SILENT = _gauge(
    "apar_shared_state_silent",
    "gateways",
    {},
    "1 while the state that several gateways share does not answer, so that this gateway uses an "
    "equal part of all slots, else 0.",
)
SETTINGS_REFUSED = _gauge(
    "apar_settings_refused",
    "settings",
    {"source": "keys_file; user_config: settings that Ray Serve passes to the running gateway"},
    "1 while a gateway has not fully applied the newest settings from this source, else 0.",
)

EVENT_LOOP_LAG = _histogram(
    "apar_event_loop_lag_seconds",
    "seconds",
    {},
    _LAG_S,
    "Delay of a timer in a gateway's event loop, which all requests share. Ten samples a second.",
)

# Every process that writes a log.
LOG_LINES_DROPPED = _counter(
    "apar_log_lines_dropped_total",
    "lines",
    {},
    "Log lines that a gateway or replica dropped because the disk hung.",
)

# Every node.
BUILD_INFO = _gauge(
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
    """Yield all metrics of this project in the order above."""
    for value in globals().values():
        if isinstance(value, Metric) and value not in VLLM:
            yield value


_ENGINE = {"model_name": "public name of the model", "replica": "id of the replica"}
PREEMPTIONS = _counter(
    "vllm:num_preemptions_total",
    "preemptions",
    _ENGINE,
    "Threads preempted to free their KV blocks.",
)
PREFIX_CACHE_QUERIES = _counter(
    "vllm:prefix_cache_queries_total",
    "tokens",
    _ENGINE,
    "Prompt tokens looked up in the prefix cache.",
)
PREFIX_CACHE_HITS = _counter(
    "vllm:prefix_cache_hits_total",
    "tokens",
    _ENGINE,
    "Prompt tokens found in the prefix cache.",
)
VLLM = (PREEMPTIONS, PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS)
"""vLLM's metrics that rules and dashboards use; the page adds the label `replica`."""
