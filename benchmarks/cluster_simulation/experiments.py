"""Runs each experiment for each model, and writes what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.cluster_simulation import plots, tables
from benchmarks.cluster_simulation.measures import Slo
from benchmarks.cluster_simulation.scaling import START_DELAY_S, simulate_scaling
from benchmarks.cluster_simulation.scenarios import (
    FORK_POLICIES,
    FORK_REPLICAS,
    Cell,
    Plan,
    RecordedData,
    forking_cells,
    routing_cells,
)
from benchmarks.cluster_simulation.step_times import ReplicaModel

SLO = Slo()
BeginSteps = Callable[[int], Callable[[], None]]


def routing(
    data: RecordedData,
    models: Sequence[ReplicaModel],
    plan: Plan,
    out: Path,
    console: Console,
    begin: BeginSteps,
    jobs: int,
) -> None:
    """Compare the ways to choose a replica."""
    runs = sum(num_seeds for _, num_seeds in plan.scenarios) * len(plan.policies)
    step = begin(runs * len(models))
    for model in models:
        cells = routing_cells(data, model, plan, SLO, step, jobs)
        title = f"Routing, {model.name}"
        _write(out, f"routing-{model.name}", title, cells, tables.ROUTING_COLUMNS, console)
        goals = tables.goal_table(cells)
        (out / f"goals-{model.name}.md").write_text(goals)
        console.print(goals, markup=False)
        for replicas in sorted({cell.scenario.replicas for cell in cells}):
            even = [
                cell
                for cell in cells
                if cell.scenario.replicas == replicas and cell.scenario.name == "even"
            ]
            if len({cell.scenario.load for cell in even}) > 1:
                plots.load_plot(
                    out / f"routing-{model.name}-{replicas}.png",
                    f"{title}, {replicas} replicas",
                    even,
                    plots.ROUTING_PANELS,
                )


def forking(
    data: RecordedData,
    models: Sequence[ReplicaModel],
    plan: Plan,
    out: Path,
    console: Console,
    begin: BeginSteps,
    jobs: int,
) -> None:
    """Compare eager, adaptive and no forking."""
    step = begin(len(plan.fork_loads) * len(FORK_POLICIES) * plan.fork_seeds * len(models))
    for model in models:
        cells = forking_cells(data, model, plan, SLO, step)
        title = f"Forking, {model.name}, {FORK_REPLICAS} replicas"
        _write(out, f"forking-{model.name}", title, cells, tables.FORKING_COLUMNS, console)
        if len(plan.fork_loads) > 1:
            plots.load_plot(out / f"forking-{model.name}.png", title, cells, plots.FORKING_PANELS)


def scaling(
    data: RecordedData,
    models: Sequence[ReplicaModel],
    plan: Plan,
    out: Path,
    console: Console,
    begin: BeginSteps,
    jobs: int,
) -> None:
    """Triple the load, and take it back."""
    step = begin(len(models))
    for model in models:
        run = simulate_scaling(data, model, stage_s=2.5 * plan.duration_s)
        step()
        title = f"Load step, {model.name}, a replica takes {START_DELAY_S:g} s to start"
        plots.scaling_plot(out / f"scaling-{model.name}.png", title, run)
        console.print(
            f"{title}: {run.num_requests} requests, {run.wanted[0]} to {max(run.wanted)} replicas, "
            f"{run.wanted[-1]} at the end, {run.replica_seconds / 3600:.2f} replica hours, "
            f"p99 at worst {max(run.latency_p99_s):.1f} s, at most {max(run.queued)} queued"
        )


RUN = {"routing": routing, "forking": forking, "scaling": scaling}


def _write(
    out: Path,
    name: str,
    title: str,
    cells: Sequence[Cell],
    columns: tables.Columns,
    console: Console,
) -> None:
    console.print(tables.rich_table(title, cells, columns))
    (out / f"{name}.md").write_text(tables.markdown_table(cells, columns))
    tables.write_csv(out / f"{name}.csv", cells)
