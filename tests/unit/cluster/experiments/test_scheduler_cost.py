from __future__ import annotations

import pytest

from apar_core.models.apar_tiny import checkpoint_path
from cluster.experiments.driven_scheduler import StepCost
from cluster.experiments.scheduler_cost import (
    ADAPTIVE,
    EAGER,
    PLAIN,
    WAYS,
    SchedulerCosts,
    SchedulerLoad,
    WayCost,
    _runs,
    measure_round,
    way_cost,
)

SMALL = SchedulerLoad(num_threads=40, threads_per_request=8, steps=20)


def test_only_steps_with_all_threads_are_compared() -> None:
    costs = [
        StepCost(1, 9.0, 9.0),
        StepCost(4, 1.0, 2.0),
        StepCost(4, 2.0, 4.0),
        StepCost(4, 3.0, 9.0),
        StepCost(2, 9.0, 9.0),
    ]

    cost = way_cost(costs, num_threads=4)

    assert (cost.schedule_s, cost.update_s, cost.step_s) == (2.0, 4.0, 6.0)
    assert cost.num_steps == 3
    assert cost.run_s_per_kilotoken == 1000 * (18 + 3 + 6 + 12 + 18) / 15


def test_a_run_that_never_had_all_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="no step had all 4 threads: 3 at most"):
        way_cost([StepCost(3, 1.0, 1.0)], num_threads=4)


def test_ratios_are_taken_within_a_round() -> None:
    def cost(step_s: float) -> WayCost:
        return WayCost(step_s, 0.0, step_s, 10, 2 * step_s)

    costs = SchedulerCosts(SMALL)
    costs.rounds.append({PLAIN: cost(1.0), EAGER: cost(1.1), ADAPTIVE: cost(1.5)})
    costs.rounds.append({PLAIN: cost(10.0), EAGER: cost(12.0), ADAPTIVE: cost(20.0)})

    assert costs.ratios(EAGER) == pytest.approx([1.1, 1.2])
    assert costs.run_ratios(ADAPTIVE) == pytest.approx([1.5, 2.0])


def test_all_threads_decode_at_once_in_each_way_and_everything_ends() -> None:
    round_costs = measure_round(SMALL, str(checkpoint_path()))

    assert list(round_costs) == list(WAYS)
    for cost in round_costs.values():
        assert cost.num_steps >= SMALL.steps
        assert cost.step_s > 0


def test_forked_and_plain_sequences_have_the_same_lengths() -> None:
    runs = dict(_runs(SMALL, str(checkpoint_path())))
    lengths = {}
    for way, run in runs.items():
        while max((cost.rows for cost in run.costs), default=0) < SMALL.num_threads:
            run.step()
        for _ in range(SMALL.steps // 2):
            run.step()
        lengths[way] = sorted(request.num_tokens for request in run.scheduler.requests.values())

    mean = {way: sum(tokens) / len(tokens) for way, tokens in lengths.items()}
    assert {way: len(tokens) for way, tokens in lengths.items()} == dict.fromkeys(WAYS, 40)
    assert mean[EAGER] == mean[ADAPTIVE]
    assert mean[PLAIN] == pytest.approx(mean[EAGER], rel=0.15)
