"""What a replica counts of its requests and its engine, by numbers worked out by hand."""

from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput

from apar_core.engine.request_follower import RequestFollower
from apar_core.tree.statistics import TreeStatistics
from cluster.metrics import catalogue
from cluster.metrics.catalogue import Metric
from deployments.replica.replica_metrics import ReplicaMetrics
from tests.fakes.played_instruments import PlayedInstruments

IDLE: dict[str, Any] = {
    "threads": 0,
    "running_threads": 3,
    "waiting_threads": 2,
    "deferred_threads": 1,
    "kv_blocks": 10,
    "free_blocks": 4,
    "generated_tokens": 119,
    "steps": {"num_steps": 57, "num_rows": 119, "busy_s": 0.5},
    "admission_counters": {"accepted": 3, "delayed": {"request": 2, "policy": 1}, "refused": 4},
    "fork_counters": {"shared_blocks": 7, "copied_blocks": 5, "released_early_blocks": 6},
}
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


class Told:
    """A replica's metrics and what they tell."""

    def __init__(self) -> None:
        self.instruments = PlayedInstruments()
        self.metrics = ReplicaMetrics(self.instruments, model="m", replica="r")

    def value(self, metric: Metric, part: str = "", **labels: str) -> float | None:
        name = metric.name + part
        return self.instruments.value(name, model="m", replica="r", **labels)


def test_finished_requests_add_up_what_their_answers_say() -> None:
    told = Told()

    for _ in range(2):
        followed = follower()
        followed.end(TREE)
        followed.first_output_s, followed.last_output_s = 10.0, 10.5
        told.metrics.finished(followed)
    told.metrics.flush(IDLE, 0)

    assert told.value(catalogue.PROMPT_TOKENS) == 10
    assert told.value(catalogue.ATTENDED_TOKENS) == 200
    assert told.value(catalogue.SEQUENTIAL_ATTENDED_TOKENS) == 400
    assert told.value(catalogue.CACHED_TOKENS) == 60
    assert told.value(catalogue.SEQUENTIAL_CACHED_TOKENS) == 80
    assert told.value(catalogue.CRITICAL_PATH_STEPS) == 22
    assert told.value(catalogue.SEQUENTIAL_STEPS) == 42
    assert told.value(catalogue.REQUEST_THREADS, "_sum") == 8
    assert told.value(catalogue.REQUEST_DEPTH, "_bucket", le="2.0") == 2
    # Half a second for the ten steps after the first token.
    assert told.value(catalogue.TIME_PER_OUTPUT_TOKEN, "_sum") == 0.1


def test_a_request_that_never_reached_the_engine_is_none() -> None:
    told = Told()

    told.metrics.finished(follower(num_roots=0))
    told.metrics.flush(IDLE, 0)

    assert told.value(catalogue.PROMPT_TOKENS) == 0
    assert told.value(catalogue.REQUEST_THREADS, "_count") == 0


def test_an_ordinary_checkpoint_saves_nothing() -> None:
    told = Told()

    told.metrics.finished(follower(tokens=4))
    told.metrics.flush(IDLE, 0)

    # 5, 6, 7 and 8 tokens stand before the four that were predicted.
    assert told.value(catalogue.ATTENDED_TOKENS) == 26
    assert told.value(catalogue.SEQUENTIAL_ATTENDED_TOKENS) == 26
    assert told.value(catalogue.CACHED_TOKENS) == 8
    assert told.value(catalogue.CRITICAL_PATH_STEPS) == 4
    assert told.value(catalogue.REQUEST_THREADS, "_sum") == 1


def test_choices_of_unknown_length_count_with_their_prompt_only() -> None:
    told = Told()

    told.metrics.finished(follower(num_roots=2, tokens=4))
    told.metrics.flush(IDLE, 0)

    assert told.value(catalogue.PROMPT_TOKENS) == 5
    assert told.value(catalogue.REQUEST_THREADS, "_count") == 0


def test_the_engine_tells_its_state_and_its_counts() -> None:
    told = Told()

    told.metrics.started(replaces_lost=True)
    told.metrics.flush(IDLE, 9)

    assert told.value(catalogue.KV_BLOCKS) == 10
    assert told.value(catalogue.KV_FREE_BLOCKS) == 4
    assert told.value(catalogue.KV_CACHE_USAGE) == 0.6
    assert told.value(catalogue.REPLICA_REQUESTS) == 9
    threads = [told.value(catalogue.THREADS, state=s) for s in ("running", "waiting", "deferred")]
    assert threads == [3, 2, 1]
    assert told.value(catalogue.ENGINE_STEPS) == 57
    assert told.value(catalogue.ENGINE_BUSY_SECONDS) == 0.5
    assert told.value(catalogue.GENERATED_TOKENS) == 119
    outcomes = ("accepted", "delayed", "refused")
    assert [told.value(catalogue.FORKS, outcome=outcome) for outcome in outcomes] == [3, 3, 4]
    assert told.value(catalogue.FORK_DELAYS, reason="request") == 2
    assert told.value(catalogue.KV_SHARED_BLOCKS) == 7
    assert told.value(catalogue.KV_COPIED_BLOCKS) == 5
    assert told.value(catalogue.KV_RELEASED_EARLY_BLOCKS) == 6
    assert told.value(catalogue.REPLICA_RESTARTS) == 1


def test_every_metric_of_a_replica_is_told_before_anything_happens() -> None:
    told = Told()

    told.metrics.started(replaces_lost=False)
    told.metrics.flush(IDLE, 0)

    names = {name for name, _ in told.instruments.values}
    for metric in catalogue.metrics():
        if "replica" in metric.labels:
            assert {metric.name, f"{metric.name}_count"} & names, metric.name
