"""Metrics of a replica, compared with numbers worked out by hand."""

import math

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput

from apar_core.engine.request_follower import RequestFollower
from apar_core.tree.statistics import TreeStatistics
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Metric
from deployments.replica.replica_metrics import ReplicaMetrics
from tests.fakes.core_states import a_core_state

IDLE = a_core_state(
    running_threads=3,
    waiting_threads=2,
    deferred_threads=1,
    kv_blocks=10,
    free_blocks=4,
    generated_tokens=119,
    steps={"num_steps": 57, "num_rows": 119, "busy_s": 0.5},
    admission_counters={"accepted": 3, "delayed": {"request": 2, "policy": 1}, "refused": 4},
    fork_counters={"shared_blocks": 7, "copied_blocks": 5, "released_early_blocks": 6},
    family_counts={"steps": 9, "shared_steps": 8, "shared_rows": 40, "saved_blocks": 25},
    join_counters={"joins": 2, "shared_tokens": 90, "computed_tokens": 30, "discarded_tokens": 12},
)
TREE = TreeStatistics(
    threads=4,
    forks=3,
    max_depth=2,
    decode_steps=11,
    sequential_steps=21,
    attended_tokens=100,
    sequential_attended_tokens=200,
    max_cached_tokens=30,
    sequential_max_cached_tokens=40,
    text_tokens=20,
    control_tokens=10,
)


def follower(*, num_roots: int = 1, tokens: int = 0, prompt: int = 5) -> RequestFollower:
    followed = RequestFollower(keeps_journal=False)
    for number in range(num_roots):
        followed.begin(f"r{number}", prompt, SamplingParams(), choice=number)
    if tokens:
        followed.add(EngineCoreOutput("r0", list(range(tokens))))
    return followed


class ExportedMetrics:
    """A replica's metrics and what they export."""

    def __init__(self) -> None:
        self.metrics = ReplicaMetrics(model="m", replica="r")

    def value(self, metric: Metric, part: str = "", **labels: str) -> float | None:
        return self.metrics.recorder.value(metric, part, **labels)


def test_finished_requests_add_their_statistics() -> None:
    exported = ExportedMetrics()

    for _ in range(2):
        followed = follower()
        followed.end(TREE)
        followed.first_output_s, followed.last_output_s = 10.0, 10.5
        exported.metrics.finished(followed)
    exported.metrics.take(IDLE, 0)

    assert exported.value(catalogue.PROMPT_TOKENS) == 10
    assert exported.value(catalogue.ATTENDED_TOKENS) == 200
    assert exported.value(catalogue.SEQUENTIAL_ATTENDED_TOKENS) == 400
    assert exported.value(catalogue.CACHED_TOKENS) == 60
    assert exported.value(catalogue.SEQUENTIAL_CACHED_TOKENS) == 80
    assert exported.value(catalogue.CRITICAL_PATH_STEPS) == 22
    assert exported.value(catalogue.SEQUENTIAL_STEPS) == 42
    assert exported.value(catalogue.REQUEST_THREADS, "_sum") == 8
    assert exported.value(catalogue.REQUEST_DEPTH, "_bucket", le="2.0") == 2
    # Half a second for the 10 steps, and the 19 tokens of text, after the first one.
    assert exported.value(catalogue.TIME_PER_CRITICAL_PATH_TOKEN, "_sum") == 0.1
    assert exported.value(catalogue.TIME_PER_OUTPUT_TOKEN, "_sum") == 2 * 0.5 / 19


def test_a_request_that_never_reached_the_engine_is_not_counted() -> None:
    exported = ExportedMetrics()

    exported.metrics.finished(follower(num_roots=0))
    exported.metrics.take(IDLE, 0)

    assert exported.value(catalogue.PROMPT_TOKENS) == 0
    assert exported.value(catalogue.REQUEST_THREADS, "_count") == 0


def test_an_unforked_request_saves_nothing() -> None:
    exported = ExportedMetrics()

    exported.metrics.finished(follower(tokens=4))
    exported.metrics.take(IDLE, 0)

    # The four tokens attend to 5, 6, 7 and 8 tokens.
    assert exported.value(catalogue.ATTENDED_TOKENS) == 26
    assert exported.value(catalogue.SEQUENTIAL_ATTENDED_TOKENS) == 26
    assert exported.value(catalogue.CACHED_TOKENS) == 8
    assert exported.value(catalogue.CRITICAL_PATH_STEPS) == 4
    assert exported.value(catalogue.REQUEST_THREADS, "_sum") == 1


def test_choices_of_unknown_length_count_only_their_prompt() -> None:
    exported = ExportedMetrics()

    exported.metrics.finished(follower(num_roots=2, tokens=4))
    exported.metrics.take(IDLE, 0)

    assert exported.value(catalogue.PROMPT_TOKENS) == 5
    assert exported.value(catalogue.REQUEST_THREADS, "_count") == 0


def test_the_engines_state_and_counters_are_exported() -> None:
    exported = ExportedMetrics()

    exported.metrics.started(replaces_lost=True)
    exported.metrics.take(IDLE, 9)

    assert exported.value(catalogue.KV_BLOCKS) == 10
    assert exported.value(catalogue.KV_FREE_BLOCKS) == 4
    assert exported.value(catalogue.KV_CACHE_USAGE) == 0.6
    assert exported.value(catalogue.REPLICA_REQUESTS) == 9
    threads = [
        exported.value(catalogue.THREADS, state=s) for s in ("running", "waiting", "deferred")
    ]
    assert threads == [3, 2, 1]
    assert exported.value(catalogue.ENGINE_STEPS) == 57
    assert exported.value(catalogue.ENGINE_BUSY_SECONDS) == 0.5
    assert exported.value(catalogue.GENERATED_TOKENS) == 119
    outcomes = ("accepted", "delayed", "refused")
    assert [exported.value(catalogue.FORKS, outcome=outcome) for outcome in outcomes] == [3, 3, 4]
    assert exported.value(catalogue.FORK_DELAYS, reason="request") == 2
    assert exported.value(catalogue.KV_SHARED_BLOCKS) == 7
    assert exported.value(catalogue.KV_COPIED_BLOCKS) == 5
    assert exported.value(catalogue.KV_RELEASED_EARLY_BLOCKS) == 6
    assert exported.value(catalogue.FAMILY_ROWS) == 40
    assert exported.value(catalogue.FAMILY_SAVED_BLOCKS) == 25
    assert exported.value(catalogue.JOINS) == 2
    assert exported.value(catalogue.JOIN_TOKENS, outcome="reused") == 90
    assert exported.value(catalogue.JOIN_TOKENS, outcome="computed") == 30
    assert exported.value(catalogue.DISCARDED_TOKENS) == 12
    assert exported.value(catalogue.REPLICA_RESTARTS) == 1


def test_every_replica_metric_is_exported_before_the_first_request() -> None:
    exported = ExportedMetrics()

    exported.metrics.started(replaces_lost=False)
    exported.metrics.take(IDLE, 0)

    registry = exported.metrics.recorder.registry
    names = {sample.name for family in registry.collect() for sample in family.samples}
    for metric in catalogue.metrics():
        if "replica" in metric.labels or metric is catalogue.REPLICA_RESTARTS:
            assert {metric.name, f"{metric.name}_count"} & names, metric.name


def test_the_state_of_an_engine_that_does_not_answer_is_unknown() -> None:
    exported = ExportedMetrics()
    gauges = (catalogue.KV_BLOCKS, catalogue.KV_FREE_BLOCKS, catalogue.KV_CACHE_USAGE)

    exported.metrics.take(IDLE, 9)
    exported.metrics.take(None, 8)

    for metric in gauges:
        assert math.isnan(exported.value(metric) or 0), metric.name
    for state in ("running", "waiting", "deferred"):
        assert math.isnan(exported.value(catalogue.THREADS, state=state) or 0)
    assert exported.value(catalogue.REPLICA_REQUESTS) == 8
    assert exported.value(catalogue.ENGINE_STEPS) == 57
