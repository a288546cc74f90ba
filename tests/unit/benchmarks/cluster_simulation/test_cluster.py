"""A simulated cluster drives the product's routers, and treats every request alike."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.cluster_simulation.arrivals import ArrivalTrace, stepped_times
from benchmarks.cluster_simulation.choosers import (
    CHOOSERS,
    OracleChooser,
    RouterChooser,
    build_choosers,
)
from benchmarks.cluster_simulation.cluster import ClusterSettings, SimCluster, saturated_rate
from benchmarks.cluster_simulation.measures import Measures, Slo, measure, summarise
from benchmarks.cluster_simulation.scaling import START_DELAY_S, simulate_scaling
from benchmarks.cluster_simulation.scenarios import RecordedData, Scenario, build_plan
from benchmarks.cluster_simulation.step_times import ReplicaModel, StepTimes
from benchmarks.cluster_simulation.trees import AnswerTree, ThreadPlan
from benchmarks.cluster_simulation.workload import MOST_PROMPT_TOKENS, Workload
from cluster.config.autoscaling import AutoscalingConfig
from deployments.routing.policies import ThreadRouter

TIMES = StepTimes(5e-3, 20e-6, 0.2e-6, 25e-6)
MODEL = ReplicaModel("test", "none", TIMES, 800, 16, max_threads=64, max_requests=12)
TREES = (
    AnswerTree((ThreadPlan(40),), 39, "plain"),
    AnswerTree((ThreadPlan(120),), 119, "plain"),
    AnswerTree((ThreadPlan(30, ((8, 1), (20, 2))), ThreadPlan(50), ThreadPlan(60)), 135, "list"),
)
TRACE = ArrivalTrace((0.1, 0.1, 3.0, 0.2, 0.1, 1.0, 0.5), (40, 300, 90, 700, 20, 1500, 120))
DATA = RecordedData(TREES, TRACE)


def run(
    policy: str,
    *,
    seed: int = 3,
    rate: float = 12.0,
    model: ReplicaModel = MODEL,
    gateways: int = 1,
) -> SimCluster:
    requests = Workload(TREES, TRACE, seed).requests(300, rate)
    settings = ClusterSettings(3, model, gateways=gateways)
    cluster = SimCluster(settings, build_choosers(policy, gateways, seed), seed)
    cluster.run(requests)
    return cluster


def ends(cluster: SimCluster) -> list[tuple[str | None, float | None]]:
    return [(outcome.replica_id, outcome.end_s) for outcome in cluster.result.outcomes]


@pytest.mark.parametrize("policy", CHOOSERS)
def test_every_request_ends_and_every_block_comes_back(policy: str) -> None:
    cluster = run(policy)

    outcomes = cluster.result.outcomes
    assert [outcome.request.request_id for outcome in outcomes] == [f"r{n}" for n in range(300)]
    for outcome in outcomes:
        assert outcome.generated_tokens == outcome.request.tree.generated_tokens
        assert outcome.sent_s is not None
        assert outcome.end_s is not None
        assert outcome.request.arrival_s <= outcome.sent_s < outcome.end_s
    for replica in cluster.replicas.values():
        assert replica.engine.pool.free == MODEL.blocks
        assert replica.engine.most_rows <= MODEL.max_threads


@pytest.mark.parametrize("policy", ["threads", "power_of_two", "oracle"])
def test_equal_seeds_give_equal_runs(policy: str) -> None:
    assert ends(run(policy)) == ends(run(policy))
    assert ends(run(policy)) != ends(run(policy, seed=4))


def test_policies_see_the_same_requests() -> None:
    threads, others = run("threads").result.outcomes, run("random").result.outcomes

    assert [outcome.request for outcome in threads] == [outcome.request for outcome in others]


@pytest.mark.parametrize("policy", ["threads", "power_of_two", "oracle"])
def test_a_replica_filled_by_another_gateway_refuses_and_the_request_waits(policy: str) -> None:
    cluster = run(policy, rate=200.0, model=replace(MODEL, max_requests=2), gateways=3)

    assert all(outcome.end_s is not None for outcome in cluster.result.outcomes)
    assert max(sample.requests for sample in cluster.result.samples) <= 3 * 2


@pytest.mark.parametrize("policy", CHOOSERS)
def test_no_replica_gets_more_than_its_cap_and_what_waits_keeps_its_order(policy: str) -> None:
    model = replace(MODEL, max_requests=2)
    cluster = run(policy, rate=200.0, model=model)

    assert max(sample.queued for sample in cluster.result.samples) > 50
    assert max(sample.requests for sample in cluster.result.samples) <= 3 * 2
    sent = [outcome.sent_s or 0.0 for outcome in cluster.result.outcomes]
    assert sent == sorted(sent)


def test_the_thread_policy_is_the_products_own_router() -> None:
    chooser, other = build_choosers("threads", 2, seed=0)

    assert isinstance(chooser, RouterChooser)
    assert type(chooser.router) is ThreadRouter
    assert other is not chooser
    assert isinstance(build_choosers("oracle", 1, seed=0)[0], OracleChooser)


def test_the_router_learns_from_answers_and_counts_none_that_has_ended() -> None:
    chooser = run("threads").gateways[0].chooser

    assert isinstance(chooser, RouterChooser)
    assert chooser.router.num_sent == 0
    hint = Workload(TREES, TRACE, 0).requests(1, 1.0)[0].hint
    assert 1.0 < chooser.router.forecaster.forecast(hint).threads < 3.0


def test_arrivals_keep_their_bursts_at_any_rate() -> None:
    arrivals = TRACE.arrivals(70, rate=100.0, start=2)
    times = [at_s for at_s, _ in arrivals]
    gaps = [after - before for before, after in pairwise(times)]

    assert times[-1] == pytest.approx(0.7)
    assert gaps[0] / gaps[1] == pytest.approx(0.2 / 0.1)
    assert [tokens for _, tokens in arrivals[:3]] == [90, 700, 20]


def test_stages_follow_each_other_at_their_rates() -> None:
    times = stepped_times(TRACE, [(10.0, 4.0), (10.0, 12.0)], seed=1)

    assert times == sorted(times)
    assert times[39] == pytest.approx(10.0)
    assert len(times) == 160
    assert times[-1] == pytest.approx(20.0)


def test_conversations_and_applications_share_their_beginnings() -> None:
    requests = Workload(TREES, TRACE, 5).requests(2000, 10.0)

    firsts = [request.pieces[0][0] for request in requests]
    turns = [len(request.pieces) for request in requests]
    assert 0.4 < sum(first < 0 for first in firsts) / len(firsts) < 0.6
    # A system prompt, a question, an answer, the next question.
    assert 0.1 < sum(each >= 3 for each in turns) / len(turns) < 0.35
    for request in requests:
        covered = [tokens for _, tokens in request.pieces]
        assert covered == sorted(covered)
        assert covered[-1] == request.prompt_tokens <= MOST_PROMPT_TOKENS
        assert len(request.hint.prefix_hashes) == len(request.hint.prefix_tokens)


def test_load_one_is_what_a_saturated_replica_keeps_up_with() -> None:
    rate = saturated_rate(MODEL, Workload(TREES, TRACE, 1).requests(600, 20.0))

    assert rate > 0
    slower = replace(MODEL, times=StepTimes(10e-3, 40e-6, 0.4e-6, 50e-6))
    half = saturated_rate(slower, Workload(TREES, TRACE, 1).requests(600, 20.0))
    assert half == pytest.approx(rate / 2)


def test_slow_replicas_count_for_less_and_stretch_their_steps() -> None:
    settings = ClusterSettings(16, MODEL, one_slow_of=8)

    cluster = SimCluster(settings, build_choosers("random", 1, 0), seed=0)

    assert settings.speed == 15.0
    slow = [name for name, each in cluster.replicas.items() if each.slowness == 2.0]
    assert slow == ["replica-7", "replica-15"]


def measures(policy: str) -> Measures:
    return measure(run(policy).result, Slo())


def test_measures_are_shares_and_ordered_quantiles() -> None:
    measured = measures("round_robin")

    assert 0 < measured.first_token_p50_s <= measured.p50_s <= measured.p99_s
    assert measured.step_p50_s <= measured.step_p99_s
    assert 0 <= measured.goodput <= 1
    assert measured.max_over_mean >= 1
    assert measure(run("round_robin").result, Slo(token_s=1e-6)).goodput == 0


def test_several_seeds_have_an_interval() -> None:
    one, two = measures("random"), replace(measures("random"), p99_s=9.0)

    summary = summarise([one, two])

    assert summary.mean.p99_s == pytest.approx((one.p99_s + 9.0) / 2)
    # Student's t for one degree of freedom, times half the distance.
    assert summary.half_width.p99_s == pytest.approx(12.71 * abs(9.0 - one.p99_s) / 2, rel=1e-3)
    assert summarise([one]).half_width.p99_s == 0


def test_replicas_follow_a_load_step_after_their_start_delay() -> None:
    config = AutoscalingConfig(
        min_replicas=2, max_replicas=12, target_threads=20, downscale_delay_s=30
    )

    slow = replace(MODEL, times=StepTimes(50e-3, 1e-3, 2e-6, 250e-6))
    scaling = simulate_scaling(DATA, slow, stage_s=200.0, config=config)

    asked = next(
        at for at, wanted in zip(scaling.times_s, scaling.wanted, strict=True) if wanted > 4
    )
    got = next(at for at, up in zip(scaling.times_s, scaling.running, strict=True) if up > 4)
    assert got - asked >= START_DELAY_S
    assert scaling.running[-1] < max(scaling.running) <= 12


def scenarios(**kind: bool) -> Sequence[Scenario]:
    return [
        scenario for scenario, _ in build_plan(**{"quick": False, "full": False} | kind).scenarios
    ]


def test_the_plan_has_the_loads_and_disturbances_that_are_asked_for() -> None:
    names = {scenario.name for scenario in scenarios()}

    assert {scenario.load for scenario in scenarios()} == {0.5, 0.7, 0.85, 0.95, 1.05}
    assert {scenario.replicas for scenario in scenarios(full=True)} == {8, 64, 512}
    assert names == {
        "even",
        "1 of 8 at half speed",
        "reports every 1 s",
        "reports every 5 s",
        "1 of 8 at half speed, reports every 5 s",
        "4 gateways",
        "4 gateways, reports every 1 s",
    }
    assert len(scenarios(quick=True)) == 1
    only = build_plan(quick=False, full=True).only([512], [0.95], ["oracle"])
    assert [scenario.replicas for scenario, _ in only.scenarios] == [512]
    assert only.policies == ("oracle",)
