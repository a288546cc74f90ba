"""State of the engine core: live threads, free KV blocks, counters and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from apar_core.scheduler.family_reads import ask_workers
from apar_core.scheduler.fork_policy import AdaptivePolicy
from apar_core.scheduler.thread_table import ThreadTable
from apar_core.vllm_names import add_utility, call_before_requests, worker_in_this_process

CORE_STATE_CALL = "apar_core_state"
_OF_ONE_RANK = ("step_s", "num_steps", "busy_s", "thread_weight")


def core_state(scheduler: Any) -> dict[str, Any]:
    """Return the current counts and the counters since the start, as plain values.

    requests: requests of the engine with a live thread; a client's request with several choices or
        prompts counts as several.
    threads: running and waiting threads. deferred_threads: children that have not started.
    waiting_parents: threads that wait until their children have ended.
    kv_blocks, free_blocks: blocks of the KV cache, and blocks that no thread holds.
    step_s: mean time of the last steps. steps: number, rows and seconds of all steps.
    generated_tokens: tokens sampled. step_costs: what the adaptive fork policy has learned.
    thread_weight: what a thread beside others of its request costs over a request's first thread;
    less than 1 where layers read families.
    """
    pool = scheduler.kv_cache_manager.block_pool
    num_running, num_waiting = scheduler.get_request_counts()
    state: dict[str, Any] = {
        "threads": len(scheduler.requests),
        "running_threads": num_running,
        "waiting_threads": num_waiting,
        # Without vLLM's null block, which is never free and never used.
        "kv_blocks": pool.num_gpu_blocks - 1,
        "free_blocks": pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
    }
    # vLLM's own schedulers have no threads.
    if isinstance(getattr(scheduler, "threads", None), ThreadTable):
        groups = scheduler.threads.groups
        num_forked = sum(len(group.live) for group in groups)
        state["requests"] = len(groups) + len(scheduler.requests) - num_forked
        state["deferred_threads"] = sum(len(group.deferred) for group in groups)
        state["waiting_parents"] = sum(len(group.waiting) for group in groups)
        state["deferred_by_reason"] = scheduler.admission.waiting_by_reason(groups)
        state["generated_tokens"] = scheduler.num_generated_tokens
        state["fork_counters"] = asdict(scheduler.block_sharing.counters)
        state["join_counters"] = asdict(scheduler.block_sharing.join_counters)
        state["admission_counters"] = asdict(scheduler.admission.counters)
        state["thread_weight"] = scheduler.family_reads.thread_weight
        clock = scheduler.step_clock
        state["step_s"] = clock.mean_s
        state["steps"] = {
            "num_steps": clock.num_steps,
            "num_rows": clock.num_rows,
            "busy_s": clock.busy_s,
        }
        policy = scheduler.admission.policy
        if isinstance(policy, AdaptivePolicy):
            state["step_costs"] = asdict(policy.learned.costs)
    return state


def combined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of several ranks that run side by side, as if they were one engine.

    Counts are added. Their steps take place at the same time, so number, time and learned costs of
    steps are those of the rank with the most.
    """
    if len(states) == 1:
        return states[0]
    whole: dict[str, Any] = {}
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if name in _OF_ONE_RANK:
            whole[name] = max(values)
        elif name == "step_costs":
            whole[name] = max(zip(states, values, strict=True), key=_num_steps)[1]
        else:
            whole[name] = combined(values) if isinstance(first, dict) else sum(values)
    return whole


def _num_steps(state: tuple[dict[str, Any], Any]) -> int:
    return int(state[0]["steps"]["num_steps"])


def install_core_state() -> None:
    """Make `core_state` callable from the API process, as an engine-core utility.

    Workers are asked before the first request, as an engine without a replica has no reports.
    """
    add_utility(CORE_STATE_CALL, _state_of_core)
    call_before_requests(ask_workers)


def _state_of_core(engine_core: Any) -> dict[str, Any]:
    ask_workers(engine_core)
    state = core_state(engine_core.scheduler)
    # Of workers with family attention: see `apar_core/attention/plan.py`.
    counts = getattr(worker_in_this_process(engine_core), "family_counts", None)
    return state if counts is None else state | {"family_counts": counts()}
