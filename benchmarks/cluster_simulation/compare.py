"""Run this simulation and the one on virtual cores on the same requests with the same step costs.

`python -m benchmarks.cluster_simulation.compare OUT.json`. Step costs are linear, which both can
express, and equal for rows and prompt tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from apar_core.scheduler.fork_policy import build_policy
from apar_core.step_costs.costs import StepCosts
from apar_core.step_costs.models import find_model
from apar_core.virtual.core import VirtualCores, run_open_loop
from apar_core.virtual.engine import VirtualSpec
from benchmarks.cluster_simulation import cluster as old
from benchmarks.cluster_simulation.choosers import build_choosers
from benchmarks.cluster_simulation.replica import SimReplica
from benchmarks.cluster_simulation.step_times import ReplicaModel, StepTimes
from benchmarks.cluster_simulation.threads import Outcome
from benchmarks.cluster_simulation.threads import SimRequest as OldRequest
from benchmarks.cluster_simulation.trees import AnswerTree, ThreadPlan
from cluster.config.model import ModelConfig
from cluster.config.routing import RoutingSettings
from cluster.simulation.cluster import Cluster, ClusterSettings
from cluster.simulation.workload import CONTEXT_TOKENS, Answer, PromptTokens, SimRequest, read_data

DATA = Path("../shared/data")
BASE_S, TOKEN_S, ATTENDED_S = 10.3e-3, 40e-6, 0.32e-6
KV_TOKENS, BLOCK = 108_304, 16


def old_tree(answer: Answer, forked: bool, fork_id: int) -> AnswerTree:
    """Return the answer as this simulation counts it."""
    scripts = answer.threads if forked else {"": answer.flat}
    keys = sorted(scripts, key=lambda key: [int(part) for part in key.split(".") if part])
    index = {key: number for number, key in enumerate(keys)}
    plans = []
    for key in keys:
        positions = [i + 1 for i, token in enumerate(scripts[key]) if token == fork_id]
        children = [f"{key}.{n}" if key else str(n) for n in range(len(positions))]
        forks = tuple((at, index[child]) for at, child in zip(positions, children, strict=True))
        plans.append(ThreadPlan(len(scripts[key]), forks))
    return AnswerTree(tuple(plans), answer.text_tokens, answer.category)


def old_request(request: SimRequest, fork_id: int) -> OldRequest:
    """Return the same request; its pieces are cut where the new one's are."""
    ends, total = [], 0
    for piece in request.pieces:
        total += piece.text_tokens if isinstance(piece, Answer) else piece[1]
        ends.append(total)
    pieces = tuple(zip(request.hint.prefix_hashes, ends, strict=True))
    tree = old_tree(request.answer, request.forked, fork_id)
    return OldRequest(
        request.request_id, request.arrival_s, request.prompt_tokens, tree, request.hint, pieces
    )


def figures(name: str, rows: list[tuple[float, float, float, int]], **more: Any) -> dict[str, Any]:
    """Summarise (arrival, first token, end, cached tokens) of each request."""
    table = np.array(rows, dtype=float)
    latency, first = table[:, 2] - table[:, 0], table[:, 1] - table[:, 0]
    ends = np.sort(table[:, 2])
    low, high = np.quantile(ends, [0.3, 0.8])
    return {
        "engine": name,
        "requests": len(rows),
        "end_s": float(ends[-1]),
        "requests_per_s": float(0.5 * len(rows) / (high - low)),
        "mean_s": float(latency.mean()),
        "p50_s": float(np.quantile(latency, 0.5)),
        "p99_s": float(np.quantile(latency, 0.99)),
        "first_mean_s": float(first.mean()),
        "first_p99_s": float(np.quantile(first, 0.99)),
        "cached_tokens": int(table[:, 3].sum()),
        **more,
    }


def old_model(cap: int) -> ReplicaModel:
    times = StepTimes(BASE_S, TOKEN_S, ATTENDED_S, TOKEN_S)
    return ReplicaModel(
        "compare", "linear", times, KV_TOKENS // BLOCK, BLOCK, 1400, cap, step_tokens=8192
    )


def old_single(requests: list[OldRequest], cap: int) -> dict[str, Any]:
    """Serve with one replica in a closed loop of `cap` requests."""
    began = time.perf_counter()
    env = simpy.Environment()
    model = replace(old_model(cap))
    replica = SimReplica(env, "replica", model, build_policy("eager", 0.0))
    waiting = deque(Outcome(request) for request in requests)
    rows: list[tuple[float, float, float, int]] = []
    begun: dict[str, float] = {}

    def following(ended: Outcome | None) -> None:
        if ended is not None:
            name = ended.request.request_id
            rows.append((begun[name], ended.first_token_s, env.now, ended.cached_tokens))  # type: ignore[arg-type]
        if waiting:
            begun[waiting[0].request.request_id] = env.now
            replica.submit(waiting.popleft(), following)

    for _ in range(cap):
        following(None)
    env.run()
    engine = replica.engine
    return figures(
        "old", rows, steps=engine.step, preemptions=engine.preemptions,
        most_rows=engine.most_rows, real_s=time.perf_counter() - began,
    )  # fmt: skip


def new_spec(is_async: bool) -> VirtualSpec:
    costs = StepCosts(
        "linear", "predicted", "comparison",
        ((1, TOKEN_S), (1 << 20, TOKEN_S * (1 << 20))), ATTENDED_S, launch_s=BASE_S,
    )  # fmt: skip
    return VirtualSpec(
        find_model("llama-7b").config, costs, KV_TOKENS, BLOCK,
        CONTEXT_TOKENS, 1400, 8192, is_async,
    )  # fmt: skip


def new_single(requests: list[SimRequest], cap: int, is_async: bool) -> dict[str, Any]:
    """Serve with one virtual core in a closed loop of `cap` requests."""
    began = time.perf_counter()
    core = VirtualCores(new_spec(is_async)).build()
    prompts = PromptTokens()
    waiting = iter(requests)

    def following(end_s: float) -> list[Any]:
        request = next(waiting, None)
        return [] if request is None else [request.virtual_request(prompts.of(request), end_s)]

    first = [each for _ in range(cap) for each in following(0.0)]
    served = run_open_loop(core, first, lambda end: following(end.end_s))
    rows = [(e.arrival_s, e.first_token_s, e.end_s, e.cached_tokens) for e in served]
    return figures(
        "new, async" if is_async else "new, sync", rows, steps=core.totals.steps,
        preemptions=core.preemptions, most_rows=core.totals.largest_rows,
        real_s=time.perf_counter() - began,
    )  # fmt: skip


def old_cluster(requests: list[OldRequest], number: int, cap: int) -> dict[str, Any]:
    """Serve with several replicas behind the product's router."""
    began = time.perf_counter()
    settings = old.ClusterSettings(number, old_model(cap), report_period_s=0.2)
    cluster = old.SimCluster(settings, build_choosers("threads", 1, 0), 0)
    run = cluster.run(requests)
    rows = [(o.request.arrival_s, o.first_token_s, o.end_s, o.cached_tokens) for o in run.outcomes]
    steps = sum(replica.engine.step for replica in cluster.replicas.values())
    return figures(
        "old", rows, steps=steps, preemptions=run.preemptions,  # type: ignore[arg-type]
        real_s=time.perf_counter() - began,
    )  # fmt: skip


def new_cluster(
    requests: list[SimRequest], number: int, cap: int, is_async: bool
) -> dict[str, Any]:
    """Serve with several virtual cores behind the product's router."""
    began = time.perf_counter()
    model = ModelConfig(checkpoint="apar-7b", max_concurrency=cap, max_queued_requests=1 << 20,
                        max_queue_s=1e6)  # fmt: skip
    settings = ClusterSettings(new_spec(is_async), model, number, RoutingSettings())
    run = Cluster(settings, 0).run(requests)
    rows = [(o.request.arrival_s, o.first_token_s, o.end_s, o.cached_tokens) for o in run.outcomes]
    return figures(
        "new, async" if is_async else "new, sync", rows, steps=run.steps,  # type: ignore[arg-type]
        preemptions=run.preemptions, real_s=time.perf_counter() - began,
    )  # fmt: skip


def main() -> None:
    """Write all figures as JSON."""
    traces = [DATA / "traces" / name for name in ("mixed.jsonl", "structured.jsonl")]
    data = read_data(traces, DATA / "arrivals" / "AzureLLMInferenceTrace_conv.csv")
    from apar_core.virtual.core import checkpoint_tokens

    fork_id = checkpoint_tokens().fork_id
    found: dict[str, Any] = {}
    for cap in (32, 128, 350):
        for forked in (False, True):
            requests = data.workload(99).requests([(1000.0, 1.0)], forked=forked)
            olds = [old_request(each, fork_id) for each in requests]
            name = f"closed loop of {cap}, {'forked' if forked else 'sequential'}"
            found[name] = [
                old_single(olds, cap),
                new_single(requests, cap, False),
                new_single(requests, cap, True),
            ]
            print(name, json.dumps(found[name], indent=1), flush=True)
    for number, rate in ((1, 4.0), (1, 5.2), (4, 16.0), (4, 20.8)):
        requests = data.workload(7).requests([(1200 / rate, rate)])
        olds = [old_request(each, fork_id) for each in requests]
        name = f"{number} replicas, {rate:g} requests/s"
        found[name] = [
            old_cluster(olds, number, 350),
            new_cluster(requests, number, 350, False),
            new_cluster(requests, number, 350, True),
        ]
        print(name, json.dumps(found[name], indent=1), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
