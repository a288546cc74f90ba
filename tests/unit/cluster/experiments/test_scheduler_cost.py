"""The engine's own time per row: what is compared, and that the compared engines do the same."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.experiments.scheduler_cost import (
    RunCost,
    SchedulerCosts,
    SchedulerCostSettings,
    Way,
    _MeasuredEngine,
    core_us_per_row,
    cost_table,
    report_scheduler_cost,
)

NUM_ANSWERS, NUM_TIPS = 6, 4
TIPS = "\n".join(
    f"{i}. Tip {i}: do this and that, and then do it again." for i in range(1, NUM_TIPS + 1)
)


@pytest.fixture
def settings(tmp_path: Path) -> SchedulerCostSettings:
    trace = tmp_path / "answers.jsonl"
    lines = [
        {"id": i, "category": "c", "prompt": f"Give me {i} tips.", "response": f"Tips:\n\n{TIPS}"}
        for i in range(NUM_ANSWERS)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return SchedulerCostSettings(trace=trace, answers=NUM_ANSWERS, max_requests=4, rounds=1)


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def run_cost(way: Way, settings: SchedulerCostSettings, folder: Path) -> RunCost:
    return next(cost for cost in _MeasuredEngine(way, settings, folder).run() if cost is not None)


@pytest.mark.engine
@pytest.mark.usefixtures("_unfrozen")
def test_without_forks_our_scheduler_schedules_exactly_the_steps_of_vllms(
    settings: SchedulerCostSettings, tmp_path: Path
) -> None:
    vllm = run_cost("vLLM", settings, tmp_path / "vllm")
    ours = run_cost("ours, sequential", settings, tmp_path / "ours")

    assert ours.digest == vllm.digest
    assert (ours.steps, ours.rows, ours.forks) == (vllm.steps, vllm.rows, 0)


@pytest.mark.engine
@pytest.mark.slow
def test_each_way_runs_in_a_process_of_its_own_and_every_answer_forks(
    settings: SchedulerCostSettings, tmp_path: Path
) -> None:
    report = report_scheduler_cost(settings, tmp_path / "out", lambda *_: lambda: None)

    (costs,) = report.data["rounds"]
    assert costs["ours, forked"]["forks"] == NUM_ANSWERS * NUM_TIPS
    assert costs["ours, sequential"]["digest"] == costs["vLLM"]["digest"]
    assert all(cost["schedule_s"] > 0 and cost["outputs_s"] > 0 for cost in costs.values())


def test_costs_are_per_row_and_ratios_are_taken_within_a_round() -> None:
    def cost(core_s: float) -> RunCost:
        return RunCost(
            steps=10, rows=100, tokens=50, schedule_s=core_s / 2, update_s=core_s / 2, digest="d"
        )

    costs = SchedulerCosts(
        [
            {"vLLM": cost(1e-3), "ours, sequential": cost(1e-3), "ours, forked": cost(1.2e-3)},
            {"vLLM": cost(4e-3), "ours, sequential": cost(4e-3), "ours, forked": cost(5.6e-3)},
        ]
    )

    assert costs.ratio("ours, forked", core_us_per_row) == pytest.approx(1.3)
    by_way = {row[0]: row for row in cost_table(costs).rows}
    assert by_way["ours, forked"][1:6] == pytest.approx((10, 17, 17, 34, 1.3))
    assert by_way["vLLM"][7] == pytest.approx(50)
