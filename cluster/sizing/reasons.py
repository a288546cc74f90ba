"""A plan in lines: each figure with what it follows from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from apar_core.step_costs.models import ModelSize
from cluster.config.model import MAX_THREADS
from cluster.sizing.memory import GIB
from cluster.sizing.plan import Plan

PAPER_CAPS = {"apar-7b": 350, "apar-13b": 180}
"""APAR (arXiv 2401.06761), C.2: of one A100-80G."""
PAPER_ATTENDED = "15 to 35 %"
PAPER_CACHED = "12 to 27 %"
"""Its tables 1 and 2, over the categories that fork."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a plan."""

    name: str
    value: str
    reason: str


Section = tuple[str, list[Line]]


def reasons(plan: Plan, model: ModelSize, tensor_parallel: int) -> list[Section]:
    """All figures in the order in which they follow from each other."""
    return [
        ("Request", list(_request(plan))),
        ("Memory of a replica", list(_memory(plan, model, tensor_parallel))),
        ("Caps of a replica", list(_caps(plan, model))),
        ("Time", list(_time(plan))),
        ("Replicas", list(_replicas(plan))),
    ]


def _request(plan: Plan) -> Iterator[Line]:
    shape = plan.shape
    yield Line(
        "prompt + answer",
        f"{shape.prompt_tokens:,.0f} + {shape.text_tokens:,.0f} tokens",
        shape.source,
    )
    yield Line(
        "decode steps",
        f"{shape.steps:,.0f}",
        f"the critical path; {shape.sequential_steps:,.0f} without forks; a long answer (99 %) "
        f"takes {shape.long_steps:,.0f}",
    )
    yield Line(
        "threads",
        f"{shape.threads:.1f} in all, {shape.alive_threads:.2f} at once",
        "means over the requests, and over a request's steps",
    )
    attended = _change(shape.attended_tokens, shape.sequential_attended_tokens)
    yield Line(
        "attended tokens",
        f"{shape.attended_tokens:,.0f}",
        f"{attended} against one thread; the paper saves {PAPER_ATTENDED} where answers fork",
    )
    cached = _change(shape.peak_tokens, shape.sequential_peak_tokens)
    yield Line(
        "cached tokens",
        f"{shape.held_tokens:,.0f} on average",
        f"{shape.peak_tokens:,.0f} at the peak, {cached} against one thread; the paper saves "
        f"{PAPER_CACHED} where answers fork",
    )


def _memory(plan: Plan, model: ModelSize, tensor_parallel: int) -> Iterator[Line]:
    memory = plan.memory
    each = f" on each of {tensor_parallel} GPUs" if tensor_parallel > 1 else ""
    yield Line(
        "weights",
        f"{memory.weight_bytes / GIB:.2f} GiB{each}",
        f"{model.parameters / 1e9:.3f} billion parameters in {model.dtype}; {model.source}",
    )
    if memory.overhead_bytes:
        yield Line(
            "beside them",
            f"{memory.overhead_bytes / GIB:.1f} GiB{each}",
            "activations, CUDA graphs, context: assumed; vLLM prints the true figure at its start",
        )
    yield Line(
        "KV cache per token",
        f"{memory.kv_bytes_per_token / 1024:,.0f} KiB{each}",
        f"2 x {model.layers} layers x {model.kv_heads} KV heads x {model.head_dim} x "
        f"{model.kv_bytes_per_token // (2 * model.layers * model.kv_heads * model.head_dim)} bytes"
        + (", split over the GPUs" if tensor_parallel > 1 else ""),
    )
    yield Line(
        "KV cache",
        f"{memory.kv_bytes / GIB:.1f} GiB{each}",
        f"{memory.blocks:,} blocks of {memory.block_size} tokens = {memory.tokens:,} tokens, of "
        f"{memory.usable_bytes / GIB:.1f} GiB that may be used",
    )


def _caps(plan: Plan, model: ModelSize) -> Iterator[Line]:
    caps, shape = plan.caps, plan.shape
    yield Line(
        "by memory",
        f"{caps.by_memory:,} requests",
        f"{shape.held_tokens:,.0f} tokens each and half a block a thread, give or take "
        f"{shape.held_tokens_sd:,.0f}: they fit in 99 of 100 moments; beyond, vLLM preempts",
    )
    yield Line("by threads", f"{caps.by_threads:,} requests", f"{MAX_THREADS} threads in an engine")
    if caps.by_token_time is not None:
        yield Line(
            "by time per token",
            f"{caps.by_token_time:,} requests",
            f"a step of {1000 * plan.replica.base_s:.2f} ms + "
            f"{1000 * plan.replica.growth_s:.3f} ms a request stays within "
            f"{1000 * (plan.goals.token_s or 0):g} ms",
        )
    yield Line("max_concurrency", f"{caps.requests:,} requests", _paper(plan, model))
    yield Line(
        "max_replica_threads",
        f"{plan.threads:,} threads",
        f"{shape.alive_threads:.2f} a request, give or take {shape.alive_threads_sd:.2f}, in 99 of "
        "100 moments; further forks wait. Also vLLM's max_num_seqs, by threads_per_request",
    )


def _paper(plan: Plan, model: ModelSize) -> str:
    paper = PAPER_CAPS.get(model.name)
    if paper is None:
        return "the least of these"
    return (
        f"the least of these; the paper's cap on an A100-80G is {paper}, "
        f"{paper / plan.caps.by_memory:.2f} times what fits here; it bounds only a cold start"
    )


def _time(plan: Plan) -> Iterator[Line]:
    costs, replica = plan.costs, plan.replica
    parts = [
        f"{1000 * costs.base_s:.2f} ms", f"{1e6 * costs.thread_s:.1f} us a thread",
        f"{1e9 * costs.attended_token_s:.0f} ns an attended token",
        f"{1e6 * costs.prefill_token_s:.1f} us a prompt token",
    ]  # fmt: skip
    yield Line("step time", " + ".join(parts), costs.source)
    yield Line(
        "step of a full replica",
        f"{1000 * replica.step_s(replica.cap):.1f} ms",
        f"{replica.cap} requests, each {1000 * replica.growth_s:.3f} ms a step: its threads, what "
        "they read, and a newcomer's prompt",
    )
    yield Line(
        "rate of a full replica",
        f"{replica.full_rate:.2f} requests/s",
        f"{replica.cap} requests / ({replica.steps:,.0f} steps x that), Little's law",
    )


def _replicas(plan: Plan) -> Iterator[Line]:
    goals, most = plan.goals, plan.most
    if plan.users_each is None:
        load = f"{goals.requests_per_s:g} requests/s"
        each = f"{most.rate:.2f} requests/s"
        bound = f"{most.utilisation:.0%} of the full rate"
    else:
        load = f"{goals.users:,} users"
        each = f"{plan.users_each:,.0f} users"
        bound = f"{most.requests:,.0f} inside, the others think for {goals.think_s:g} s"
    held = "by the bound on utilisation" if _bounded(plan) else "as much as the goals allow"
    yield Line("planned for each", each, f"{bound}, {held}")
    yield Line(
        "that serve",
        f"{plan.serving_replicas}",
        f"{load} and {goals.headroom:.0%} headroom, divided by that",
    )
    yield Line("spare", f"{goals.spare}", "away during a rollout, or lost")
    yield Line("replicas", f"{plan.replicas}", "to run")
    expected = plan.expected
    yield Line(
        "expected",
        f"{expected.requests:.0f} requests, {expected.requests * plan.shape.alive_threads:.0f} "
        "threads each",
        f"at the load asked for, spare ones away: {expected.utilisation:.0%} of the full rate, "
        f"{plan.expected_kv_share:.0%} of the KV cache, {1000 * expected.step_s:.1f} ms a step",
    )
    yield Line(
        "within 99 of 100",
        f"first token {_s(expected.first_token_s)}, {1000 * expected.busy_step_s:.0f} ms a token, "
        f"long answer {_s(expected.latency_s)}",
        f"asked for: {_goal(goals.first_token_s)}, {_goal(goals.token_s)}, "
        f"{_goal(goals.latency_s)}; wait for a place {_s(expected.wait_s)}; a mean answer takes "
        f"{_s(expected.mean_latency_s)}",
    )


def _bounded(plan: Plan) -> bool:
    if plan.users_each is None:
        return plan.most.utilisation > plan.goals.utilisation - 1e-6
    return plan.most.requests >= int(plan.goals.utilisation * plan.replica.cap)


def _change(value: float, against: float) -> str:
    return f"{100 * (value / against - 1):+.0f} %"


def _s(value_s: float) -> str:
    return f"{1000 * value_s:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"


def _goal(value_s: float | None) -> str:
    return "nothing" if value_s is None else _s(value_s)
