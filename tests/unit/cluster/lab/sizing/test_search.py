"""The search finds the highest rate that keeps the limits, the same for the same question."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.attention import families as grouping
from apar_core.attention.settings import FamilySettings
from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.plan import Load, make_plan
from cluster.lab.sizing.replica_run import Slos
from cluster.lab.sizing.report import candidates_table
from cluster.lab.sizing.search import (
    UTILISATION,
    Candidate,
    EvenPoisson,
    Runner,
    bisect,
    find_cap,
    grid_rate,
    highest,
    rate_place,
    saturate,
)
from tests.unit.cluster.lab.sizing.small_replica import CONDITIONS, REPLICA

CANDIDATE = Candidate(0, 6, forked=True)


@pytest.fixture(scope="module")
def runs() -> Runner:
    return Runner([REPLICA], CONDITIONS)


def with_slos(runs: Runner, slos: Slos) -> Runner:
    return Runner(runs.replicas, replace(CONDITIONS, slos=slos))


@given(st.integers(-5, 45), st.integers(0, 40), st.integers(1, 9))
def test_the_highest_number_that_keeps_is_found(bound: int, start: int, jump: int) -> None:
    tried: list[int] = []

    def keeps(number: int) -> bool:
        tried.append(number)
        return number <= bound

    found = highest(keeps, start, jump=jump, least=0, most=40)

    assert found == (None if bound < 0 else min(bound, 40))
    assert len(tried) == len(set(tried))
    assert set(tried) <= set(range(41))


@given(st.floats(1e-3, 1e4))
def test_the_grid_has_a_rate_at_most_3_percent_below_any(rate: float) -> None:
    place = rate_place(rate)

    assert grid_rate(place) <= rate < grid_rate(place + 1)
    assert grid_rate(place + 1) / grid_rate(place) == pytest.approx(1.03, rel=0.012)


def test_arrivals_have_the_mean_rate_and_equal_proportions_at_every_rate() -> None:
    slow, fast = EvenPoisson(2.0).times_s(1000, 7), EvenPoisson(8.0).times_s(1000, 7)

    assert slow[-1] == pytest.approx(500)
    assert slow[199] == pytest.approx(100)
    assert fast == pytest.approx([time_s / 4 for time_s in slow])
    gaps = [after - before for before, after in pairwise(slow)]
    assert min(gaps) > 0
    # Poisson: gaps vary as much as their mean.
    deviation = math.sqrt(sum((gap - 0.5) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(0.5, rel=0.1)


def test_threads_that_read_together_make_a_replica_of_forked_requests_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compiling takes four seconds.
    monkeypatch.setattr(grouping, "_compiled", lambda: grouping.partition)
    costs = replace(REPLICA.costs, attended_token_s=1e-3)
    ordinary = replace(REPLICA, costs=costs)
    family = replace(ordinary, family=FamilySettings(min_prefix_blocks=1))
    runs = Runner([ordinary, family], CONDITIONS)

    found = [
        runs.run(replace(CANDIDATE, replica=index), None, Slos(), measured=10) for index in (0, 1)
    ]
    caps = [runs.estimated_cap(index, 0.3, forked=True) for index in (0, 1)]
    flat = [runs.estimated_cap(index, 0.3, forked=False) for index in (0, 1)]

    assert found[1].rows_per_s > 1.05 * found[0].rows_per_s
    assert caps[1] > caps[0]
    assert flat[1] == flat[0]


def test_the_rate_found_keeps_the_limits_and_the_next_one_does_not(runs: Runner) -> None:
    found = bisect(runs, saturate(runs, CANDIDATE, is_complete=True))

    assert found.run is not None
    assert found.run.broken == ()
    for name, limit_s in CONDITIONS.slos.named().items():
        assert found.run.times[name].p99_s <= limit_s
    above = runs.run(CANDIDATE, grid_rate(found.place + 1))
    assert above.broken == found.broken
    # The same run again, and in the middle of others.
    assert runs.run(CANDIDATE, found.rate) == found.run


def test_without_tight_limits_the_throughput_is_the_limit(runs: Runner) -> None:
    patient = with_slos(runs, Slos(first_token_s=60.0))

    found = bisect(patient, saturate(patient, CANDIDATE, is_complete=True))

    assert found.broken == ("throughput",)
    assert found.rate <= UTILISATION * found.saturated.rate < 1.03 * 1.01 * found.rate
    assert found.saturated.run.peak_running == CANDIDATE.cap


@pytest.mark.ci
def test_stricter_limits_never_give_a_higher_rate(runs: Runner) -> None:
    saturated = saturate(runs, CANDIDATE, is_complete=True)
    rates = [
        bisect(with_slos(runs, slos), saturated).rate
        for slos in (Slos(first_token_s=0.2), Slos(0.1), Slos(0.1, latency_s=0.5))
    ]

    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1] > 0


def test_the_cap_is_the_largest_that_keeps_the_time_per_token_when_saturated(runs: Runner) -> None:
    limit_s = 0.02
    limited = with_slos(runs, Slos(2.0, token_s=limit_s))

    found = find_cap(limited, 0, forked=False)

    assert 1 < found.candidate.cap < runs.largest_cap(0, forked=False)
    assert found.run.times["time per token"].p99_s <= limit_s
    larger = Candidate(0, math.ceil(1.12 * found.candidate.cap), forked=False)
    assert saturate(limited, larger).run.broken == ("time per token",)
    # Nothing but memory bounds it otherwise.
    assert find_cap(runs, 0, forked=True).candidate.cap == runs.largest_cap(0, forked=True)


def test_a_plan_recommends_the_candidate_with_the_fewest_gpus(runs: Runner) -> None:
    stages: list[tuple[str, int]] = []

    def started(stage: str, total: int) -> object:
        stages.append((stage, total))
        return lambda: None

    plan = make_plan(Load(20.0, spare=2), runs, caps=(6,), start_stage=started)  # type: ignore[arg-type]

    assert stages == [("candidates", 2), ("confirmation", 1)]
    assert [choice.found.candidate for choice in plan.choices] == [
        Candidate(0, 6, True), Candidate(0, 6, False)
    ]  # fmt: skip
    assert plan.best.found.candidate == Candidate(0, 6, True)
    assert plan.num_replicas == plan.num_serving + 2
    assert plan.best.run.broken == plan.expected.broken == ()
    assert plan.best.found.rate <= plan.searched.found.rate
    assert plan.best.found.rate * plan.num_serving >= 20.0 * 1.2
    assert plan.expected_rate * plan.num_serving >= 20.0
    assert plan.sequential is not None
    assert not plan.sequential.found.candidate.forked
    shown = candidates_table(plan).shown_rows()
    assert [row[:3] for row in shown[-2:]] == [
        ["small", "sequential", "6"], ["small", "confirmed", "6"]
    ]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("slos", "problem"),
    [
        (Slos(2.0, token_s=0.005), r"on an idle small: --token 0\.005s \(p99 0\.01"),
        (Slos(2.0, latency_s=0.1), r"on an idle small: --latency 0\.1s \(p99 0\.\d+s\)"),
    ],
)
def test_limits_that_an_idle_replica_misses_are_named(
    runs: Runner, slos: Slos, problem: str
) -> None:
    with pytest.raises(SizingError, match=problem):
        make_plan(Load(1.0), with_slos(runs, slos), caps=(1,))


@given(st.floats(0.1, 500), st.floats(1, 8), st.floats(0.1, 20), st.floats(0.1, 30))
def test_more_load_never_needs_fewer_replicas(
    load: float, factor: float, rate: float, latency_s: float
) -> None:
    few, many = Load(load), Load(load * factor)
    assert few.serving(rate, latency_s) <= many.serving(rate, latency_s)
    assert few.serving(rate, latency_s) >= few.serving(2 * rate, latency_s)
    users, more = Load(users=math.ceil(load)), Load(users=math.ceil(load * factor))
    assert users.serving(rate, latency_s) <= more.serving(rate, latency_s)


def test_users_are_served_by_the_response_time_law() -> None:
    load = Load(users=400, think_s=20.0, headroom=0.0)

    # 400 users who think for 20 s and wait for 5 s send 16 requests per second.
    assert load.serving(4.0, 5.0) == 4
    assert load.rate_each(4, 5.0) == 4.0


@pytest.mark.parametrize(("rate", "users"), [(None, None), (1.0, 5), (0.0, None)])
def test_a_load_is_a_rate_or_users(rate: float | None, users: int | None) -> None:
    with pytest.raises(SizingError, match="load"):
        Load(rate, users)
