"""A plan's number of replicas keeps the goals in the simulated cluster, and half of it does not.

The simulation drives the product's own router and fork admission with recorded answers at recorded
times, bursts and shared prompts included, of which the plan knows the means only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from apar_core.tree import ROOT_THREAD, ParagraphTree, ThreadId
from benchmarks.cluster_simulation.choosers import build_choosers
from benchmarks.cluster_simulation.cluster import ClusterSettings, Run, SimCluster
from benchmarks.cluster_simulation.measures import Slo, measure
from benchmarks.cluster_simulation.scenarios import RecordedData
from benchmarks.cluster_simulation.step_times import ROOFLINE_7B, ReplicaModel, StepTimes
from benchmarks.cluster_simulation.threads import SimRequest
from benchmarks.cluster_simulation.trees import AnswerTree
from cluster.sizing.memory import gpu_memory
from cluster.sizing.plan import Goals, Plan, make_plan
from cluster.sizing.request_shape import shape_of
from cluster.sizing.step_costs import roofline

DATA = Path(__file__).resolve().parents[5] / "shared" / "data"
SLO = Slo(first_token_s=2.0, token_s=0.05)
RATE = 24.0
SECONDS = 100.0
SEED = 5

pytestmark = [
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no recorded answers and arrivals in {DATA}"),
]


def paragraphs(answer: AnswerTree) -> ParagraphTree[int]:
    """The tree of an answer of which only the lengths of its threads are known."""
    tree: ParagraphTree[int] = ParagraphTree()
    names = [ROOT_THREAD]
    for index, thread in enumerate(answer.threads):
        # An end token, and a fork token for each child, are no text.
        written = forks = 0
        for generated, child in thread.forks:
            tree.append(names[index], range(generated - forks - 1 - written))
            written = generated - forks - 1
            forks += 1
            while len(names) <= child:
                names.append(ThreadId(""))
            names[child] = ThreadId(f"{names[index]}.{forks}")
            tree.fork(names[index], names[child])
        tree.append(names[index], range(thread.num_tokens - 1 - forks - written))
        tree.finish(names[index])
    return tree


def planned(requests: Sequence[SimRequest]) -> Plan:
    model = find_model("apar-7b")
    gpu = find_gpu("h100-80g")
    answers = [(each.prompt_tokens, paragraphs(each.tree)) for each in requests]
    goals = Goals(
        requests_per_s=RATE, first_token_s=SLO.first_token_s, token_s=SLO.token_s, spare=0
    )
    return make_plan(
        goals,
        shape_of(answers, "the simulated requests"),
        roofline(model, gpu, 1),
        gpu_memory(model, gpu.memory_gib, 0.9, 1, 16),
    )


def simulated(plan: Plan, replicas: int, requests: Sequence[SimRequest]) -> Run:
    costs, memory = plan.costs, plan.memory
    times = StepTimes(costs.base_s, costs.thread_s, costs.attended_token_s, costs.prefill_token_s)
    model = ReplicaModel(
        "planned", costs.source, times, memory.blocks, memory.block_size,
        max_threads=plan.threads, max_requests=plan.caps.requests,
    )  # fmt: skip
    cluster = SimCluster(ClusterSettings(replicas, model), build_choosers("threads", 1, SEED), SEED)
    return cluster.run(requests)


def mean_latency_s(run: Run) -> float:
    latencies = [
        outcome.end_s - outcome.request.arrival_s
        for outcome in run.outcomes
        if outcome.end_s is not None
    ]
    assert len(latencies) == len(run.outcomes)
    return fmean(latencies)


def test_the_planned_replicas_keep_the_goals_and_half_of_them_do_not() -> None:
    requests = RecordedData.read(DATA).workload(SEED).requests(round(RATE * SECONDS), RATE)
    plan = planned(requests)

    enough = simulated(plan, plan.serving_replicas, requests)
    too_few = simulated(plan, plan.serving_replicas // 2, requests)

    assert plan.serving_replicas >= 2
    assert measure(enough, SLO).goodput >= 0.99
    assert measure(too_few, SLO).goodput < 0.9
    # The plan's latencies are those of the simulation, of the mean and of the longest answers.
    assert mean_latency_s(enough) == pytest.approx(plan.expected.mean_latency_s, rel=0.2)
    assert measure(enough, SLO).p99_s == pytest.approx(plan.expected.latency_s, rel=0.2)


def test_the_roofline_is_the_simulations() -> None:
    costs = roofline(find_model("apar-7b"), find_gpu("h100-80g"), 1)
    times = ROOFLINE_7B.times

    assert costs.base_s == pytest.approx(times.base_s, rel=0.03)
    assert costs.thread_s == pytest.approx(times.row_s, rel=0.03)
    assert costs.attended_token_s == pytest.approx(times.attended_token_s, rel=0.03)
    assert costs.prefill_token_s == pytest.approx(times.prefill_token_s, rel=0.03)
