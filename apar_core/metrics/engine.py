"""Metrics of an engine: their declarations, and what its state and its answers add to them.

A replica exports them under these names and labels, and vLLM's own server does so without the label
`replica` (`apar_core/engine/server_metrics.py`). The catalogue of all metrics, with those of
gateways, is `deployments/metrics/catalogue.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from apar_core.scheduler.core_state import CoreState, StepTotals
    from apar_core.tree.statistics import TreeStatistics


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


MODEL = {"model": "public name of the model"}
REPLICA = MODEL | {"replica": "id of the replica; changes with every start"}
_THREADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_DEPTHS = (0, 1, 2, 3, 4, 6, 8)


def counter(name: str, unit: str, labels: dict[str, str], text: str) -> Metric:
    """Declare a counter."""
    return Metric(name, Kind.COUNTER, unit, text, labels)


def gauge(
    name: str, unit: str, labels: dict[str, str], text: str, *, same_everywhere: bool = False
) -> Metric:
    """Declare a gauge."""
    return Metric(name, Kind.GAUGE, unit, text, labels, same_everywhere=same_everywhere)


def histogram(
    name: str, unit: str, labels: dict[str, str], buckets: tuple[float, ...], text: str
) -> Metric:
    """Declare a histogram."""
    return Metric(name, Kind.HISTOGRAM, unit, text, labels, buckets)


# Current state of an engine.
KV_BLOCKS = gauge("apar_kv_blocks", "blocks", REPLICA, "KV blocks in the engine's cache.")
KV_FREE_BLOCKS = gauge("apar_kv_free_blocks", "blocks", REPLICA, "Free KV blocks.")
KV_CACHE_USAGE = gauge(
    "apar_kv_cache_usage_ratio", "ratio", REPLICA, "Share of KV blocks held by threads."
)
THREADS = gauge(
    "apar_threads",
    "threads",
    REPLICA
    | {
        "state": "running; resting: misses steps to keep to a time per token; waiting for the "
        "scheduler; deferred: a fork held back by a cap"
    },
    "Threads in the engine, by state.",
)
ENGINE_REQUESTS = gauge(
    "apar_engine_requests",
    "requests",
    REPLICA
    | {"state": "running: has begun, and has not ended; waiting: nothing of it has been computed"},
    "Requests in the engine, each counted once with all its threads; each choice of `n` counts.",
)

# Counters of an engine since its start.
FORKS = counter(
    "apar_forks_total",
    "forks",
    REPLICA
    | {
        "outcome": "accepted at once; delayed by a cap and started later; refused because of a "
        "limit of the request or the model's context, or where a list would lower the throughput"
    },
    "Forks requested by models, by outcome.",
)
FORK_DELAYS = counter(
    "apar_fork_delays_total",
    "forks",
    REPLICA
    | {"reason": "request, key or replica: the cap on its threads; policy: the fork policy"},
    "Delayed forks, by the first reason for the delay.",
)
KV_SHARED_BLOCKS = counter(
    "apar_kv_shared_blocks_total",
    "blocks",
    REPLICA,
    "KV blocks that parents shared with children.",
)
KV_COPIED_BLOCKS = counter(
    "apar_kv_copied_blocks_total", "blocks", REPLICA, "Partially filled KV blocks copied at forks."
)
KV_RELEASED_EARLY_BLOCKS = counter(
    "apar_kv_released_early_blocks_total",
    "blocks",
    REPLICA,
    "KV blocks released by threads that ended before their request.",
)
FAMILY_ROWS = counter(
    "apar_family_rows_total",
    "rows",
    REPLICA,
    "Decoding rows read together with others of their family (`attention: family`). Counted where "
    "the worker runs in the engine core's process, as on one GPU.",
)
FAMILY_SAVED_BLOCKS = counter(
    "apar_family_saved_blocks_total",
    "blocks",
    REPLICA,
    "KV block reads per layer that were not needed, because a family's blocks are read once.",
)
JOINS = counter(
    "apar_joins_total",
    "joins",
    REPLICA,
    "Threads that continued after the texts of children for which they had waited.",
)
JOIN_TOKENS = counter(
    "apar_join_tokens_total",
    "tokens",
    REPLICA | {"outcome": "reused: found in the KV cache; computed: most of them once more"},
    "Tokens before threads that continued after their children's texts.",
)
DISCARDED_TOKENS = counter(
    "apar_discarded_tokens_total",
    "tokens",
    REPLICA,
    "Generated tokens that are no part of any text: list items after the end of their list.",
)
ENGINE_STEPS = counter("apar_engine_steps_total", "steps", REPLICA, "Forward passes.")
ENGINE_BUSY_SECONDS = counter(
    "apar_engine_busy_seconds_total", "seconds", REPLICA, "Time spent in forward passes."
)

GENERATED_TOKENS = counter(
    "apar_generated_tokens_total",
    "tokens",
    REPLICA,
    "Tokens generated by all threads, counted as they are generated: text, fork and end tokens.",
)

CHILD_TOKENS = counter(
    "apar_child_tokens_total",
    "tokens",
    REPLICA,
    "Tokens generated by threads that forks have opened, counted when the thread ends.",
)

# Requests finished by an engine: sums of the `apar` fields of their answers, and the same
# counts for requests that may not fork. A cancelled request counts with what it had generated. Not
# counted: beam search, and several choices (`n` > 1) of a checkpoint without control tokens. A
# request continued on another replica counts there, as a whole.
PROMPT_TOKENS = counter(
    "apar_prompt_tokens_total", "tokens", REPLICA, "Prompt tokens of finished requests."
)
ATTENDED_TOKENS = counter(
    "apar_attended_tokens_total",
    "tokens",
    REPLICA,
    "Attended tokens, summed over generated tokens (paper, section 3.4).",
)
SEQUENTIAL_ATTENDED_TOKENS = counter(
    "apar_sequential_attended_tokens_total",
    "tokens",
    REPLICA,
    "Attended tokens that a single thread would have needed for the same text.",
)
CACHED_TOKENS = counter(
    "apar_max_cached_tokens_total",
    "tokens",
    REPLICA,
    "Peak number of cached tokens of a request, summed over requests.",
)
SEQUENTIAL_CACHED_TOKENS = counter(
    "apar_sequential_max_cached_tokens_total",
    "tokens",
    REPLICA,
    "Peak number of cached tokens with a single thread, summed over requests.",
)
CRITICAL_PATH_STEPS = counter(
    "apar_critical_path_steps_total",
    "steps",
    REPLICA,
    "Decode steps until a request's last thread ends, summed over requests.",
)
SEQUENTIAL_STEPS = counter(
    "apar_sequential_steps_total",
    "steps",
    REPLICA,
    "Decode steps that a single thread would have needed, summed over requests.",
)
REQUEST_THREADS = histogram(
    "apar_request_threads",
    "threads",
    REPLICA,
    _THREADS,
    "Number of threads of a finished request.",
)
REQUEST_DEPTH = histogram(
    "apar_request_tree_depth",
    "levels",
    REPLICA,
    _DEPTHS,
    "Depth of a finished request's paragraph tree.",
)


def engine_metrics() -> Iterator[Metric]:
    """Yield all metrics above, in their order."""
    for value in globals().values():
        if isinstance(value, Metric):
            yield value


class Record(Protocol):
    """What the functions below count with."""

    def inc(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""

    def set_total(self, metric: Metric, total: float, **labels: str) -> None:
        """Set a counter whose count is kept elsewhere."""

    def set(self, metric: Metric, value: float | None, **labels: str) -> None:
        """Set a gauge; None is an unknown value."""

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""


_STATE_GAUGES = (KV_BLOCKS, KV_FREE_BLOCKS, KV_CACHE_USAGE)
_THREAD_STATES = {
    "running": "running_threads",
    "resting": "resting_threads",
    "waiting": "waiting_threads",
    "deferred": "deferred_threads",
}
_REQUEST_STATES = {"running": "running_requests", "waiting": "waiting_requests"}
REQUEST_COUNTERS = (
    ATTENDED_TOKENS,
    SEQUENTIAL_ATTENDED_TOKENS,
    CACHED_TOKENS,
    SEQUENTIAL_CACHED_TOKENS,
    CRITICAL_PATH_STEPS,
    SEQUENTIAL_STEPS,
    PROMPT_TOKENS,
)
REQUEST_HISTOGRAMS = (REQUEST_THREADS, REQUEST_DEPTH)


def record_state(record: Record, state: CoreState | None) -> None:
    """Set the gauges and counters of an engine core's state; None if it is unknown."""
    if state is None:
        values: tuple[float | None, ...] = (None, None, None)
    else:
        values = (state.kv_blocks, state.free_blocks, state.kv_use)
    for metric, value in zip(_STATE_GAUGES, values, strict=True):
        record.set(metric, value)
    record_numbers(record, state)
    if state is not None and state.steps is not None:
        record_totals(record, state, state.steps)


def record_numbers(record: Record, state: CoreState | None) -> None:
    """Set how many requests and threads there are."""
    for metric, fields in ((THREADS, _THREAD_STATES), (ENGINE_REQUESTS, _REQUEST_STATES)):
        for name, field_name in fields.items():
            record.set(metric, None if state is None else getattr(state, field_name), state=name)


def record_totals(record: Record, state: CoreState, steps: StepTotals) -> None:
    """Set the counters that the scheduler keeps since the engine's start."""
    forks, sharing, joins = state.admission_counters, state.fork_counters, state.join_counters
    record.set_total(ENGINE_STEPS, steps.num_steps)
    record.set_total(ENGINE_BUSY_SECONDS, steps.busy_s)
    record.set_total(GENERATED_TOKENS, state.generated_tokens)
    record.set_total(CHILD_TOKENS, state.child_tokens)
    record.set_total(FORKS, forks.accepted, outcome="accepted")
    record.set_total(FORKS, sum(forks.delayed.values()), outcome="delayed")
    record.set_total(FORKS, forks.refused, outcome="refused")
    for reason, number in forks.delayed.items():
        record.set_total(FORK_DELAYS, number, reason=reason)
    record.set_total(KV_SHARED_BLOCKS, sharing.shared_blocks)
    record.set_total(KV_COPIED_BLOCKS, sharing.copied_blocks)
    record.set_total(KV_RELEASED_EARLY_BLOCKS, sharing.released_early_blocks)
    families = state.family_counts
    record.set_total(FAMILY_ROWS, families.get("shared_rows", 0))
    record.set_total(FAMILY_SAVED_BLOCKS, families.get("saved_blocks", 0))
    record.set_total(JOINS, joins.joins)
    record.set_total(JOIN_TOKENS, joins.shared_tokens, outcome="reused")
    record.set_total(JOIN_TOKENS, joins.computed_tokens, outcome="computed")
    record.set_total(DISCARDED_TOKENS, joins.discarded_tokens)


def record_request(record: Record, trees: TreeStatistics) -> None:
    """Count a request that is over, for whatever reason."""
    record.inc(ATTENDED_TOKENS, trees.attended_tokens)
    record.inc(SEQUENTIAL_ATTENDED_TOKENS, trees.sequential_attended_tokens)
    record.inc(CACHED_TOKENS, trees.max_cached_tokens)
    record.inc(SEQUENTIAL_CACHED_TOKENS, trees.sequential_max_cached_tokens)
    record.inc(CRITICAL_PATH_STEPS, trees.decode_steps)
    record.inc(SEQUENTIAL_STEPS, trees.sequential_steps)
    record.observe(REQUEST_THREADS, trees.threads)
    record.observe(REQUEST_DEPTH, trees.max_depth)
