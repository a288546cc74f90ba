"""Plans meet their goals, and follow their inputs in the right direction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar_core.step_costs.gpus import find_gpu
from apar_core.step_costs.models import find_model
from cluster.sizing.errors import SizingError
from cluster.sizing.fork_profiles import find_profile
from cluster.sizing.memory import ReplicaMemory, gpu_memory
from cluster.sizing.plan import Goals, Plan, make_plan
from cluster.sizing.step_costs import StepCosts, roofline

SIZE, GPU = find_model("apar-7b"), find_gpu("a100-80g")
COSTS = roofline(SIZE, GPU, 1)
MEMORY = gpu_memory(SIZE, GPU.memory_gib, 0.9, 1, 16)
SHAPE = find_profile("mixed").shape(140, 300)
FREE = StepCosts(0.0, 0.0, 0.0, 0.0, "given")
GOALS = Goals(requests_per_s=20.0, token_s=0.05, first_token_s=1.0, latency_s=30.0)


def planned(
    goals: Goals = GOALS,
    memory: ReplicaMemory = MEMORY,
    costs: StepCosts = COSTS,
    forks: str = "mixed",
    prompt: float = 140,
    answer: float = 300,
) -> Plan:
    return make_plan(goals, find_profile(forks).shape(prompt, answer), costs, memory)


def test_a_plan_keeps_its_goals_and_its_bounds() -> None:
    plan = planned()

    assert plan.replicas == plan.serving_replicas + 1
    assert plan.expected.rate * plan.serving_replicas == pytest.approx(20.0)
    assert plan.expected.rate * 1.2 <= plan.most.rate
    assert plan.most.utilisation <= 0.8 + 1e-9
    for operation in (plan.most, plan.expected):
        assert operation.busy_step_s <= 0.05
        assert operation.first_token_s <= 1.0
        assert operation.latency_s <= 30.0
    assert 0 < plan.expected_kv_share < plan.most_kv_share < 1
    assert plan.caps.requests <= plan.threads <= 1024


def test_the_cap_is_the_least_of_what_bounds_it() -> None:
    plan = planned()
    assert plan.caps.by_token_time is not None
    assert plan.replica.step_s(plan.caps.by_token_time) <= 0.05
    assert plan.replica.step_s(plan.caps.by_token_time + 1) > 0.05
    assert plan.caps.requests == plan.caps.by_token_time

    without = planned(replace(GOALS, token_s=None))
    assert without.caps.by_token_time is None
    assert without.caps.requests == without.caps.by_memory


def test_threads_that_cost_nothing_are_bounded_by_memory_alone() -> None:
    plan = planned(Goals(requests_per_s=20.0, token_s=0.05), costs=replace(FREE, base_s=0.01))

    assert plan.caps.by_token_time is None
    assert plan.caps.requests == plan.caps.by_memory
    assert plan.expected.busy_step_s == plan.most.step_s == 0.01


def test_users_are_served_by_the_response_time_law() -> None:
    busy = planned(Goals(users=400, token_s=0.05))
    thoughtful = planned(Goals(users=400, think_s=20.0, token_s=0.05))

    assert busy.most.requests == int(0.8 * busy.caps.requests)
    assert busy.users_each == busy.most.requests
    assert thoughtful.replicas < busy.replicas
    expected = thoughtful.expected
    inside_and_thinking = expected.rate * (expected.mean_latency_s + 20.0)
    assert inside_and_thinking * thoughtful.serving_replicas == pytest.approx(400, rel=1e-3)
    assert busy.expected.requests * busy.serving_replicas == pytest.approx(400, rel=1e-3)


@pytest.mark.parametrize(
    ("goals", "named"),
    [
        (Goals(), "either requests per second or users"),
        (Goals(requests_per_s=1.0, users=1), "either requests per second or users"),
        (Goals(requests_per_s=0.0), "more than nothing"),
        (Goals(requests_per_s=1.0, utilisation=1.0), "between 0 and 1"),
        (Goals(requests_per_s=1.0, token_s=0.005), r"takes 9\.\d ms, longer than the 5 ms"),
        (Goals(requests_per_s=1.0, first_token_s=0.01), "the first token takes 0.03 s"),
        (Goals(users=1, latency_s=1.0), r"a long answer takes 7\.\d+ s, 1 s were asked for"),
    ],
)
def test_what_cannot_be_met_is_told_with_figures(goals: Goals, named: str) -> None:
    with pytest.raises(SizingError, match=named):
        planned(goals)


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        (FREE, r"takes no time \(given\)"),
        (replace(FREE, base_s=0.1), r"takes 100\.0 ms, longer than the 50 ms"),
    ],
)
def test_step_times_that_make_no_plan_are_told(costs: StepCosts, named: str) -> None:
    with pytest.raises(SizingError, match=named):
        planned(Goals(users=5, token_s=0.05), costs=costs)


def test_a_request_that_does_not_fit_is_told() -> None:
    tiny = replace(MEMORY, kv_bytes=MEMORY.kv_bytes_per_token * 200)

    with pytest.raises(SizingError, match="holds 192 tokens"):
        planned(memory=tiny)


rates = st.floats(0.1, 500)
factors = st.floats(1.0, 8.0)


@settings(deadline=None)
@given(rates, factors)
def test_more_load_never_needs_fewer_replicas(rate: float, factor: float) -> None:
    low = planned(replace(GOALS, requests_per_s=rate))
    high = planned(replace(GOALS, requests_per_s=rate * factor))

    assert low.replicas <= high.replicas
    assert low.caps == high.caps


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5000), st.floats(0, 60))
def test_more_users_never_need_fewer_replicas(users: int, more: int, think_s: float) -> None:
    goals = Goals(users=users, think_s=think_s, token_s=0.05)

    assert planned(goals).replicas <= planned(replace(goals, users=users + more)).replicas


@settings(max_examples=40, deadline=None)
@given(rates, st.floats(0.02, 0.2), factors, st.sampled_from(["token_s", "latency_s"]))
def test_a_stricter_goal_never_needs_fewer_replicas(
    rate: float, token_s: float, factor: float, goal: str
) -> None:
    strict = Goals(requests_per_s=rate, token_s=token_s, latency_s=token_s * 755)
    mild = replace(strict, **{goal: getattr(strict, goal) * factor})

    assert planned(mild).replicas <= planned(strict).replicas


@settings(max_examples=40, deadline=None)
@given(rates, factors, st.sampled_from(["memory", "headroom", "spare", "answer", "speed"]))
def test_each_input_moves_the_plan_its_own_way(rate: float, factor: float, what: str) -> None:
    goals = Goals(requests_per_s=rate)
    base = planned(goals)
    if what == "memory":
        assert planned(goals, replace(MEMORY, kv_bytes=MEMORY.kv_bytes * factor)).replicas <= (
            base.replicas
        )
    elif what == "headroom":
        assert planned(replace(goals, headroom=0.2 * factor)).replicas >= base.replicas
    elif what == "spare":
        spare = int(factor)
        assert planned(replace(goals, spare=spare)).replicas == base.serving_replicas + spare
    elif what == "answer":
        longer = planned(goals, answer=300 * factor)
        assert longer.replicas >= base.replicas
        assert longer.caps.by_memory <= base.caps.by_memory
    else:
        slower = StepCosts(
            COSTS.base_s * factor, COSTS.thread_s * factor, COSTS.attended_token_s * factor,
            COSTS.prefill_token_s * factor, "slower",
        )  # fmt: skip
        assert planned(goals, costs=slower).replicas >= base.replicas


@settings(deadline=None)
@given(rates)
def test_forks_never_need_more_replicas(rate: float) -> None:
    goals = Goals(requests_per_s=rate, token_s=0.05)

    assert planned(goals, forks="mixed").replicas <= planned(goals, forks="none").replicas
