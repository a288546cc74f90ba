"""State of the engine core: live threads, free KV blocks, counters and step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from apar_core.scheduler.block_sharing import ForkCounters, JoinCounters
from apar_core.scheduler.family_reads import ask_workers
from apar_core.scheduler.fork_admission import AdmissionCounters
from apar_core.scheduler.thread_table import ThreadTable
from apar_core.step_costs.costs import StepCosts
from apar_core.vllm_names import add_utility, call_before_requests, worker_in_this_process

CORE_STATE_CALL = "apar_core_state"
_OF_ONE_RANK = ("step_s", "num_steps", "busy_s", "thread_weight")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Number, rows and seconds of all steps."""

    num_steps: int
    num_rows: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreState:
    """Current counts of an engine core, and its counters since the start.

    The fields with defaults are those of our scheduler; `steps` is None with vLLM's own.

    requests: requests of the engine with a live thread; a client's request with several choices or
        prompts counts as several.
    threads: running, resting and waiting threads. deferred_threads: children that have not started.
    resting_threads: threads that took no part in the last step, to keep to a time per token.
    waiting_parents: threads that wait until their children have ended.
    kv_blocks, free_blocks: blocks of the KV cache, and blocks that no thread holds.
    step_s: mean time of the last steps.
    generated_tokens: tokens sampled.
    step_costs: what the adaptive fork policy has learned.
    thread_weight: what a thread beside others of its request costs over a request's first thread;
        less than 1 where layers read families.
    family_counts: of workers with family attention: see `apar_core/attention/plan.py`.
    """

    requests: int
    threads: int
    running_threads: int
    waiting_threads: int
    kv_blocks: int
    free_blocks: int
    deferred_threads: int = 0
    resting_threads: int = 0
    waiting_parents: int = 0
    deferred_by_reason: Mapping[str, int] = field(default_factory=dict)
    generated_tokens: int = 0
    fork_counters: ForkCounters = field(default_factory=ForkCounters)
    join_counters: JoinCounters = field(default_factory=JoinCounters)
    admission_counters: AdmissionCounters = field(default_factory=AdmissionCounters)
    thread_weight: float = 1.0
    step_s: float = 0.0
    steps: StepTotals | None = None
    step_costs: StepCosts | None = None
    family_counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_use(self) -> float:
        """Share of the KV cache's blocks that threads hold."""
        return 1 - self.free_blocks / self.kv_blocks if self.kv_blocks else 0.0

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> CoreState:
        """Return the state that came from the engine core's process as plain values."""
        return _STATE.validate_python(values)


_STATE = TypeAdapter(CoreState)


def core_state(scheduler: Any, family_counts: Mapping[str, int] | None = None) -> CoreState:
    """Return the state of an engine core by its scheduler."""
    pool = scheduler.kv_cache_manager.block_pool
    num_running, num_waiting = scheduler.get_request_counts()
    counts: dict[str, Any] = {
        "threads": len(scheduler.requests),
        "running_threads": num_running,
        "waiting_threads": num_waiting,
        # Without vLLM's null block, which is never free and never used.
        "kv_blocks": pool.num_gpu_blocks - 1,
        "free_blocks": pool.get_num_free_blocks(),
        "family_counts": family_counts or {},
    }
    # vLLM's own schedulers have no threads.
    if not isinstance(getattr(scheduler, "threads", None), ThreadTable):
        return CoreState(requests=len(scheduler.requests), **counts)
    groups = scheduler.threads.groups
    admission, sharing, clock = scheduler.admission, scheduler.block_sharing, scheduler.step_clock
    # A thread may have ended or been preempted since.
    resting = scheduler.step_plan.resting
    num_resting = sum(request.request_id in resting for request in scheduler.running)
    counts["running_threads"] -= num_resting
    return CoreState(
        requests=len(groups) + len(scheduler.requests) - sum(len(group.live) for group in groups),
        **counts,
        deferred_threads=sum(len(group.deferred) for group in groups),
        resting_threads=num_resting,
        waiting_parents=sum(group.num_waiting for group in groups),
        deferred_by_reason=admission.waiting_by_reason(groups),
        generated_tokens=scheduler.num_generated_tokens,
        fork_counters=replace(sharing.counters),
        join_counters=replace(sharing.join_counters),
        admission_counters=replace(admission.counters, delayed=dict(admission.counters.delayed)),
        thread_weight=scheduler.family_reads.thread_weight,
        step_s=clock.mean_s,
        steps=StepTotals(clock.num_steps, clock.num_rows, clock.busy_s),
        step_costs=admission.policy.step_costs,
    )


def combined(states: Sequence[CoreState]) -> CoreState:
    """Return the state of several ranks that run side by side, as if they were one engine.

    Counts are added. Their steps take place at the same time, so number, time and learned costs of
    steps are those of the rank with the most.
    """
    if len(states) == 1:
        return states[0]
    busiest = max(states, key=lambda state: state.steps.num_steps if state.steps else 0)
    added = _added([asdict(replace(state, step_costs=None)) for state in states])
    return replace(CoreState.from_plain(added), step_costs=busiest.step_costs)


def _added(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if first is None:
            whole[name] = None
        elif isinstance(first, dict):
            whole[name] = _added(values)
        else:
            whole[name] = max(values) if name in _OF_ONE_RANK else sum(values)
    return whole


def install_core_state() -> None:
    """Make `core_state` callable from the API process, as an engine-core utility.

    Workers are asked before the first request, as an engine without a replica has no reports.
    """
    add_utility(CORE_STATE_CALL, _state_of_core)
    call_before_requests(ask_workers)


def _state_of_core(engine_core: Any) -> dict[str, Any]:
    ask_workers(engine_core)
    counts = getattr(worker_in_this_process(engine_core), "family_counts", None)
    return asdict(core_state(engine_core.scheduler, None if counts is None else counts()))
