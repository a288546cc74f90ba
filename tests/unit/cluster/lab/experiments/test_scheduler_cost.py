"""The engine's own time per row: what is compared, and that the compared engines do the same."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from apar_core.errors import EvaluationError
from cluster.lab.experiments.scheduler_cost import (
    RunCost,
    Way,
    WayCost,
    _MeasuredEngine,
    cost_table,
    report_scheduler_cost,
    way_cost,
)
from cluster.lab.experiments.settings import SchedulerCostSettings

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
    return SchedulerCostSettings(trace=trace, answers=NUM_ANSWERS, concurrency=4, repeats=2)


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

    runs = {way: cost["run"] for way, cost in report.data.items()}
    assert runs["ours, forked"]["forks"] == NUM_ANSWERS * NUM_TIPS
    assert runs["ours, sequential"]["digest"] == runs["vLLM"]["digest"]
    # A child's first row computes the fork and child tokens of its prefix.
    rows = runs["vLLM, a request per thread"]["rows"]
    assert rows == pytest.approx(runs["ours, forked"]["rows"], rel=0.05)
    assert all(min(cost["schedule_us"], cost["outputs_us"]) > 0 for cost in report.data.values())


def run(*step_us: list[float], digest: str = "d") -> RunCost:
    return RunCost(steps=len(step_us), rows=10, tokens=5, step_us=[*step_us], digest=digest)


def test_the_time_of_a_step_is_the_least_over_the_rounds() -> None:
    first, second = run([1, 20, 5], [30, 4, 5]), run([3, 10, 5], [20, 8, 7])

    cost = way_cost([first, second])

    assert (cost.schedule_us, cost.update_us, cost.outputs_us) == (2.1, 1.4, 1.0)
    assert cost.core_us == pytest.approx(3.5)
    assert cost.core_token_us == pytest.approx(7)


def test_rounds_with_different_steps_are_not_compared() -> None:
    with pytest.raises(EvaluationError, match="different steps"):
        way_cost([run([1, 1, 1]), run([1, 1, 1], digest="e")])


def test_the_table_compares_every_way_with_vllm() -> None:
    costs: dict[Way, WayCost] = {
        "vLLM": way_cost([run([10, 10, 5])]),
        "ours, forked": way_cost([run([12, 14, 5])]),
    }

    by_way = {row[0]: row for row in cost_table(costs, 1).rows}

    assert by_way["ours, forked"][1:6] == pytest.approx((1.2, 1.4, 2.6, 1.3, 0.5))
