"""A plan as text: the recommendation, and a table of the candidates tried."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from apar_core.reporting import Cell, Column, ReportTable
from apar_core.scheduler.row_limits import DEFAULT_LARGEST_GRAPH, graph_tokens_for
from cluster.lab.sizing.plan import Choice, Plan
from cluster.lab.sizing.search import UTILISATION
from deployments.config.model import MAX_THREADS

_GIB = 2**30
_CONDITIONS = {"throughput": f"{UTILISATION:.0%} of a saturated replica's rate"}


def provenance(plan: Plan) -> str:
    """Say whether step costs are predicted or measured for the recommended hardware."""
    costs = plan.hardware.costs
    how = "predicted for" if costs.kind == "predicted" else "step costs measured for"
    return f"{how} {plan.hardware.hardware}"


def recommendation(plan: Plan, model: str, kv_bytes_per_token: float) -> dict[str, str]:
    """Return the recommendation as facts by name, the most important first."""
    best, run, replica = plan.best, plan.best.run, plan.hardware
    kv_gib = replica.kv_tokens * kv_bytes_per_token / _GIB
    facts = {
        "recommended": f"{_replicas(plan)} of {model} on {_gpus(plan)}, max_concurrency "
        f"{best.found.candidate.cap}, {provenance(plan)}",
        "rate per replica": f"up to {_rate(best.found.rate)} requests/s within the limits"
        + (
            f"; {_rate(plan.searched.found.rate)} in the search, fewer in the longer confirming run"
            if plan.searched.found.rate > best.found.rate
            else ""
        ),
        "expected": f"{_rate(plan.expected_rate)} requests/s for each at the load without headroom "
        f"and without the spare: {_times(plan.expected.times)}",
        "limited by": _limits(plan),
        "KV cache": f"{replica.kv_tokens:,} tokens ({kv_gib:.1f} GiB) per replica; "
        f"{run.kv_use:.0%} used on average, {run.kv_peak:.0%} at most, {run.preemptions} "
        "preemptions",
    }
    peak_rows = max(run.peak_rows, best.found.saturated.run.peak_rows)
    facts["rows"] = f"{run.rows:.0f} per step on average, {peak_rows} at most" + (
        f"; forks wait above {MAX_THREADS}" if peak_rows > MAX_THREADS else ""
    )
    if replica.num_gpus:
        size = max(DEFAULT_LARGEST_GRAPH, graph_tokens_for(min(peak_rows, MAX_THREADS)))
        facts["rows"] += f"; `apar serve` captures CUDA graphs of up to {size}"
    if plan.sequential is not None:
        facts["forks"] = _forks(plan, plan.sequential)
    if replica.family is not None:
        facts["attention"] = (
            "threads that begin with the same KV blocks read them once (attention: family); "
            + (
                "saving and cost are predicted, not measured on a GPU"
                if replica.costs.group_pass_s
                else "its cost is not in these step costs, so the plan is optimistic"
            )
        )
    facts["requests"] = plan.conditions.workload.describe() + (
        "" if plan.conditions.arrivals is None else f"; times of {plan.conditions.arrivals.name}"
    )
    facts["step costs"] = replica.costs.source
    return facts


def candidates_table(plan: Plan) -> ReportTable:
    """Return all candidates, each at its highest rate, with the recommended one last."""
    columns = (
        Column("GPU"), Column("mode"), Column("cap"), Column("requests/s"), Column("limit"),
        Column("saturated", ".3g"), Column("first token p50/p99, s"),
        Column("per token p50/p99, ms"), Column("latency p50/p99, s"),
        Column("KV mean/peak"), Column("rows"), Column("preempted"), Column("replicas"),
        Column("GPUs"),
    )  # fmt: skip
    rows = [_row(plan, choice, "forked" if choice.found.candidate.forked else "sequential")
            for choice in plan.choices]  # fmt: skip
    rows.append(_row(plan, plan.best, "confirmed"))
    return ReportTable(
        "candidates",
        "Candidates, each at its highest rate within the limits",
        columns,
        tuple(rows),
        "saturated: rate at which requests finish when the replica is always at its cap. rows: "
        "sequences per step.",
    )


def content(plan: Plan, facts: dict[str, str], config: str, overlay: dict[str, Any]) -> Any:
    """Return the plan for JSON."""
    return {
        "replicas": plan.num_replicas,
        "serving_replicas": plan.num_serving,
        "gpus": plan.best.gpus,
        "hardware": plan.hardware.hardware,
        "max_concurrency": plan.best.found.candidate.cap,
        "rate_per_replica": plan.best.found.rate,
        "kv_tokens": plan.hardware.kv_tokens,
        "provenance": provenance(plan),
        "step_costs": asdict(plan.hardware.costs),
        "load": asdict(plan.load),
        "limits_s": plan.conditions.slos.named(),
        "confirmed": asdict(plan.best.run),
        "expected": {"rate": plan.expected_rate, **asdict(plan.expected)},
        "candidates": [
            {
                "hardware": plan.replicas[choice.found.candidate.replica].hardware,
                "forked": choice.found.candidate.forked,
                "cap": choice.found.candidate.cap,
                "rate": choice.found.rate,
                "saturated_rate": choice.found.saturated.rate,
                "limits": choice.found.broken,
                "replicas": choice.replicas,
                "gpus": choice.gpus,
                "run": None if choice.found.run is None else asdict(choice.found.run),
            }
            for choice in plan.choices
        ],
        "facts": facts,
        "config": config,
        "overlay": overlay,
    }


def _row(plan: Plan, choice: Choice, mode: str) -> tuple[Cell, ...]:
    found = choice.found
    name = plan.replicas[found.candidate.replica].hardware
    limit = ", ".join(found.broken)
    head: tuple[Cell, ...] = (name, mode, str(found.candidate.cap))
    if found.run is None:
        return (*head, "none", limit, *[None] * 9)
    run = found.run
    times = run.times
    return (
        *head, _rate(found.rate), limit, found.saturated.rate,
        f"{times['first token'].p50_s:.2f} / {times['first token'].p99_s:.2f}",
        f"{1000 * times['time per token'].p50_s:.1f} / {1000 * times['time per token'].p99_s:.1f}",
        f"{times['latency'].p50_s:.1f} / {times['latency'].p99_s:.1f}",
        f"{run.kv_use:.0%} / {run.kv_peak:.0%}", f"{run.rows:.0f}", str(run.preemptions),
        str(choice.replicas), str(choice.gpus),
    )  # fmt: skip


def _replicas(plan: Plan) -> str:
    spare = plan.num_replicas - plan.num_serving
    noun = "replica" if plan.num_replicas == 1 else "replicas"
    return f"{plan.num_replicas} {noun} ({plan.num_serving} serve, {spare} spare)"


def _gpus(plan: Plan) -> str:
    if not plan.hardware.num_gpus:
        return plan.hardware.hardware
    price = "" if plan.best.price is None else f" ({plan.best.price:g} per hour)"
    return f"{plan.best.gpus} {plan.hardware.hardware}{price}"


def _limits(plan: Plan) -> str:
    found = plan.best.found
    parts = [_CONDITIONS.get(name, f"{name} (99% of the requests)") for name in found.broken]
    if found.saturated.run.preemptions:
        parts.append("KV cache: a saturated replica preempts")
    return "; ".join(parts)


def _forks(plan: Plan, sequential: Choice) -> str:
    forked = plan.searched
    ratio = forked.found.rate / sequential.found.rate - 1
    each, alone = forked.run.times["latency"], sequential.run.times["latency"]
    return (
        f"{_rate(forked.found.rate)} requests/s per replica, {_rate(sequential.found.rate)} with "
        f"sequential decoding ({ratio:+.0%}), which needs {sequential.replicas} replicas; median "
        f"latency at these rates {each.p50_s:.1f} s and {alone.p50_s:.1f} s"
    )


def _times(times: dict[str, Any]) -> str:
    return ", ".join(f"{name} {each.p99_s:.3g} s" for name, each in times.items()) + " at p99"


def _rate(rate: float) -> str:
    return f"{rate:.3g}"
