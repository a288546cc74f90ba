"""What a replica tells: its engine at the moment and since its start, and its finished requests."""

from collections.abc import Mapping
from typing import Any

from apar_core.engine.request_follower import RequestFollower
from apar_core.tree.statistics import TreeStatistics
from cluster.metrics import catalogue
from deployments.metrics.families import Instruments
from deployments.metrics.recorder import Recorder

_OF_A_REQUEST = (
    catalogue.ATTENDED_TOKENS,
    catalogue.SEQUENTIAL_ATTENDED_TOKENS,
    catalogue.CACHED_TOKENS,
    catalogue.SEQUENTIAL_CACHED_TOKENS,
    catalogue.CRITICAL_PATH_STEPS,
    catalogue.SEQUENTIAL_STEPS,
    catalogue.PROMPT_TOKENS,
)


class ReplicaMetrics:
    """The metrics of one replica."""

    def __init__(self, instruments: Instruments, *, model: str, replica: str) -> None:
        self._recorder = Recorder(instruments, model=model, replica=replica)
        for metric in _OF_A_REQUEST:
            self._recorder.inc(metric, 0)
        for metric in (
            catalogue.REQUEST_THREADS,
            catalogue.REQUEST_DEPTH,
            catalogue.TIME_PER_OUTPUT_TOKEN,
        ):
            self._recorder.declare(metric)

    def started(self, *, replaces_lost: bool) -> None:
        """Count the replica itself, if it stands in for a lost one."""
        self._recorder.inc(catalogue.REPLICA_RESTARTS, int(replaces_lost))

    def finished(self, follower: RequestFollower) -> None:
        """Count a client's request that has reached the engine and is over, whatever ended it."""
        if follower.num_roots == 0:
            return
        self._recorder.inc(catalogue.PROMPT_TOKENS, follower.prompt_tokens)
        trees = follower.statistics or _of_one_thread(follower)
        if trees is None:
            return
        self._count(trees)
        decode_s = follower.last_output_s - follower.first_output_s
        if trees.decode_steps > 1 and decode_s > 0:
            self._recorder.observe(
                catalogue.TIME_PER_OUTPUT_TOKEN, decode_s / (trees.decode_steps - 1)
            )

    def _count(self, trees: TreeStatistics) -> None:
        record = self._recorder
        record.inc(catalogue.ATTENDED_TOKENS, trees.attended_tokens)
        record.inc(catalogue.SEQUENTIAL_ATTENDED_TOKENS, trees.sequential_attended_tokens)
        record.inc(catalogue.CACHED_TOKENS, trees.max_cached_tokens)
        record.inc(catalogue.SEQUENTIAL_CACHED_TOKENS, trees.sequential_max_cached_tokens)
        record.inc(catalogue.CRITICAL_PATH_STEPS, trees.decode_steps)
        record.inc(catalogue.SEQUENTIAL_STEPS, trees.sequential_steps)
        record.observe(catalogue.REQUEST_THREADS, trees.threads)
        record.observe(catalogue.REQUEST_DEPTH, trees.max_depth)

    def log_lines_dropped(self, num_lines: int) -> None:
        """Note how many lines of the log have been left out since the start."""
        self._recorder.set_total(catalogue.LOG_LINES_DROPPED, num_lines)

    def flush(self, state: Mapping[str, Any] | None, num_requests: int) -> None:
        """Hand all over, with the requests inside and the engine core's state, if it is known."""
        self._recorder.set(catalogue.REPLICA_REQUESTS, num_requests)
        if state is not None:
            self._take_values(state)
            if "steps" in state:
                self._take_totals(state)
        self._recorder.flush()

    def _take_values(self, state: Mapping[str, Any]) -> None:
        """Take what the engine holds at the moment."""
        record = self._recorder
        blocks, free = state["kv_blocks"], state["free_blocks"]
        record.set(catalogue.KV_BLOCKS, blocks)
        record.set(catalogue.KV_FREE_BLOCKS, free)
        record.set(catalogue.KV_CACHE_USAGE, 1 - free / blocks if blocks else 0.0)
        record.set(catalogue.THREADS, state["running_threads"], state="running")
        record.set(catalogue.THREADS, state["waiting_threads"], state="waiting")
        record.set(catalogue.THREADS, state.get("deferred_threads", 0), state="deferred")

    def _take_totals(self, state: Mapping[str, Any]) -> None:
        """Take the counts that the scheduler has kept since the engine's start."""
        record = self._recorder
        steps, forks, sharing = state["steps"], state["admission_counters"], state["fork_counters"]
        record.set_total(catalogue.ENGINE_STEPS, steps["num_steps"])
        record.set_total(catalogue.ENGINE_BUSY_SECONDS, steps["busy_s"])
        record.set_total(catalogue.GENERATED_TOKENS, state["generated_tokens"])
        record.set_total(catalogue.FORKS, forks["accepted"], outcome="accepted")
        record.set_total(catalogue.FORKS, sum(forks["delayed"].values()), outcome="delayed")
        record.set_total(catalogue.FORKS, forks["refused"], outcome="refused")
        for reason, number in forks["delayed"].items():
            record.set_total(catalogue.FORK_DELAYS, number, reason=reason)
        record.set_total(catalogue.KV_SHARED_BLOCKS, sharing["shared_blocks"])
        record.set_total(catalogue.KV_COPIED_BLOCKS, sharing["copied_blocks"])
        record.set_total(catalogue.KV_RELEASED_EARLY_BLOCKS, sharing["released_early_blocks"])


def _of_one_thread(follower: RequestFollower) -> TreeStatistics | None:
    """What forking has saved an ordinary checkpoint: nothing; None where lengths are not known."""
    num_tokens = follower.generated_tokens
    if follower.num_roots > 1 or follower.searches_beams or num_tokens == 0:
        return None
    attended = num_tokens * follower.prompt_tokens + num_tokens * (num_tokens - 1) // 2
    cached = follower.prompt_tokens + num_tokens - 1
    return TreeStatistics(
        threads=1,
        forks=0,
        max_depth=0,
        decode_steps=num_tokens,
        sequential_steps=num_tokens,
        attended_tokens=attended,
        sequential_attended_tokens=attended,
        max_cached_tokens=cached,
        sequential_max_cached_tokens=cached,
        text_tokens=num_tokens,
        control_tokens=0,
    )
