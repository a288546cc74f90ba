"""`apar experiment scheduler-cost` from its settings to its report, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, PositiveInt

from apar_core.reporting import Column, Report, ReportTable
from cluster.experiments.goals import Goal
from cluster.experiments.parts import PartStore, StartStage

if TYPE_CHECKING:
    from cluster.experiments.scheduler_cost import SchedulerCosts, WayCost

SCHEDULER_GOAL = 1.2
"""Most that a step of our scheduler may cost over one of vLLM's."""


class SchedulerLoadSettings(BaseModel):
    """Threads alive at once, of requests with so many each, and how often that is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_threads: PositiveInt = 2000
    threads_per_request: PositiveInt = 8
    steps: PositiveInt = 200
    rounds: PositiveInt = 3


def report_scheduler_cost(
    settings: SchedulerLoadSettings, folder: Path, start_stage: StartStage
) -> Report:
    """Measure the rounds that the folder does not have, and report all of them."""
    store = PartStore(folder, {name: str(value) for name, value in settings})
    # These import vLLM, which takes seconds.
    from apar_core.models.apar_tiny import checkpoint_path
    from cluster.experiments.cost_plots import scheduler_cost_figure
    from cluster.experiments.scheduler_cost import (
        SchedulerCosts,
        SchedulerLoad,
        WayCost,
        measure_round,
    )

    load = SchedulerLoad(settings.num_threads, settings.threads_per_request, steps=settings.steps)
    costs = SchedulerCosts(load)
    done = start_stage("rounds", settings.rounds)
    for number in range(settings.rounds):
        kept = store.get_or_do(
            f"round-{number}",
            lambda: {w: asdict(c) for w, c in measure_round(load, str(checkpoint_path())).items()},
        )
        costs.rounds.append({way: WayCost(**values) for way, values in kept.items()})
        done()
    return Report(
        "The scheduler's own cost of a step",
        {
            "Load": f"{load.num_threads} threads of {load.num_requests} requests, against "
            f"{load.num_threads} plain requests; {settings.rounds} rounds, step by step in turn",
            **_scheduler_goals(costs),
        },
        [_scheduler_table(costs)],
        {"scheduler-cost": scheduler_cost_figure(costs)},
        {"rounds": [{w: asdict(c) for w, c in each.items()} for each in costs.rounds]},
    )


def _scheduler_goals(costs: SchedulerCosts) -> dict[str, str]:
    from cluster.experiments.scheduler_cost import ADAPTIVE, EAGER

    goals: dict[str, str] = {}
    for way in (EAGER, ADAPTIVE):
        ratios = costs.ratios(way)
        ratio = statistics.median(ratios)
        goals[f"Goal, {way}"] = Goal(
            f"a step costs at most {SCHEDULER_GOAL}x vLLM's",
            f"{ratio:.3f}x ({min(ratios):.3f} to {max(ratios):.3f})",
            ratio <= SCHEDULER_GOAL,
        ).line
    return goals


def _scheduler_table(costs: SchedulerCosts) -> ReportTable:
    def median(way: str, value: Callable[[WayCost], float]) -> float:
        return statistics.median(value(each[way]) for each in costs.rounds)

    rows = tuple(
        (
            way,
            1e3 * median(way, lambda cost: cost.schedule_s),
            1e3 * median(way, lambda cost: cost.update_s),
            1e3 * median(way, lambda cost: cost.step_s),
            statistics.median(costs.ratios(way)),
            1e3 * median(way, lambda cost: cost.run_s_per_kilotoken),
            statistics.median(costs.run_ratios(way)),
        )
        for way in costs.rounds[0]
    )
    columns = (
        Column("scheduler"),
        Column("schedule ms", ".2f"),
        Column("update ms", ".2f"),
        Column("step ms", ".2f"),
        Column("step x", ".3f"),
        Column("whole run, ms a 1,000 tokens", ".2f"),
        Column("run x", ".3f"),
    )
    return ReportTable(
        "scheduler-cost",
        f"{costs.load.num_threads} rows that decode",
        columns,
        rows,
        note="Medians of the steps in which all rows decode, and over the rounds; x: over vLLM's "
        "in the same round. The whole run has beginnings, forks and ends too.",
    )
