"""The report of a run, and of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from matplotlib.figure import Figure

from apar_core.errors import EvaluationError
from apar_core.reporting import Cell, Column, Report, ReportTable, file_name
from cluster.loadtest.all_figures import ALL_FIGURES
from cluster.loadtest.figures import Figure as RunFigure
from cluster.loadtest.plots import cluster_figure, throughput_figure, times_figure
from cluster.loadtest.run_file import Run
from cluster.loadtest.slo import unmeasured
from cluster.loadtest.tables import (
    client_table,
    cluster_table,
    errors_table,
    forking_table,
    interval_cell,
    throughput_table,
    times_table,
)


def run_report(run: Run) -> Report:
    """Return the report of one run."""
    tables = (
        throughput_table(run),
        times_table(run),
        forking_table(run),
        cluster_table(run),
        errors_table(run),
        client_table(run),
    )
    return Report(
        title=f"Load test: {run.name}",
        facts=facts_of(run),
        tables=[table for table in tables if table is not None],
        figures=_figures([run]),
        data={"settings": run.facts.settings.model_dump(mode="json"), "figures": summary(run)},
    )


def compared(runs: Sequence[Run]) -> Report:
    """Return the report of runs side by side; ratios are over the first.

    Raises EvaluationError for fewer than two runs, or for two of the same name.
    """
    names = [run.name for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise EvaluationError(f"comparing needs two or more runs of different names: {names}")
    facts = {
        run.name: "; ".join(f"{name} {value}" for name, value in facts_of(run).items())
        for run in runs
    }
    return Report(
        title=f"Load tests: {', '.join(names)}",
        facts=facts,
        tables=[ratio_table(runs), *map(_client_table_of, runs)],
        figures=_figures(runs),
        data={"runs": {run.name: summary(run) for run in runs}},
    )


def ratio_table(runs: Sequence[Run]) -> ReportTable:
    """Return every figure of each run, and its ratio to the first one's with its interval."""
    base, *others = runs
    columns = [Column("Figure"), Column(base.name, ",.2f")]
    for run in others:
        columns += [Column(run.name, ",.2f"), Column("Ratio", ".3f"), Column("95 % interval")]
    rows: list[tuple[Cell, ...]] = []
    for figure in ALL_FIGURES:
        first = figure.estimate(base)
        if first is None and not any(figure.estimate(run) for run in others):
            continue
        title = f"{figure.title} ({figure.unit})" if figure.unit else figure.title
        row: list[Cell] = [title, first.value if first else None]
        for run in others:
            row += _compared_cells(figure, run, base)
        rows.append(tuple(row))
    return ReportTable(
        "ratios",
        f"Side by side; ratios to {base.name}",
        tuple(columns),
        tuple(rows),
        "Intervals of ratios: Welch's on the logarithms of repeats; where a run has fewer than "
        "three, by resampling the requests of both for times of requests, and none for the rest.",
    )


def facts_of(run: Run) -> Mapping[str, str]:
    """Return what a reader has to know of a run, warnings first."""
    settings = run.facts.settings
    workload = settings.workload.spec + (" (without forks)" if settings.workload.flat else "")
    facts: dict[str, str] = {}
    if marks := marks_of(run):
        facts["Attention"] = "; ".join(marks)
    facts |= {
        "Target": f"{settings.target.url}, model {settings.model}",
        "Workload": workload,
        "Arrivals": settings.arrivals,
        "Requests": f"{len(run.records)}, {len(run.whole)} with a whole answer, in "
        f"{len(run.facts.repeats)} repeats",
        "Started": run.facts.started,
    }
    if settings.slo:
        facts["Objectives"] = ", ".join(
            f"{name} {seconds:g} s" for name, seconds in settings.slo.items()
        )
    return facts


def marks_of(run: Run) -> list[str]:
    """Return what makes a run worth less than it looks."""
    marks = [
        f"repeat {facts.repeat + 1}: {mark}"
        for facts in run.facts.repeats
        for mark in facts.client.marks
    ]
    marks += [
        f"repeat {facts.repeat + 1} was ended early, after {len(run.of_repeat(facts.repeat))} of "
        f"{facts.planned} requests"
        for facts in run.facts.repeats
        if facts.interrupted
    ]
    if any(not record.counted for record in run.whole):
        marks.append("the server counts no tokens: pieces of text are counted instead")
    if left_out := run.facts.left_out:
        marks.append(f"{left_out} recorded answers were left out: longer than the context")
    if repeated := run.facts.repeated:
        marks.append(f"{repeated} requests of a repeat came before in it: prefix caches know them")
    if unknown := unmeasured(run.records, run.facts.settings.slo):
        marks.append(f"no goodput: no answer has the time of the objective {', '.join(unknown)}")
    if failed := len(run.records) - len(run.whole):
        marks.append(f"{failed} of {len(run.records)} requests have no whole answer")
    return marks


def summary(run: Run) -> dict[str, Any]:
    """Return every figure with its interval and repeats, for JSON."""
    found = {figure: figure.estimate(run) for figure in ALL_FIGURES}
    return {
        figure.name: {"unit": figure.unit, **asdict(estimate), "repeats": figure.each(run)}
        for figure, estimate in found.items()
        if estimate is not None
    }


def _compared_cells(figure: RunFigure, run: Run, base: Run) -> list[Cell]:
    estimate, ratio = figure.estimate(run), figure.ratio(run, base)
    return [
        None if estimate is None else estimate.value,
        None if ratio is None else ratio.value,
        interval_cell(ratio, ".3f"),
    ]


def _client_table_of(run: Run) -> ReportTable:
    table = client_table(run)
    name = f"client-{file_name(run.name)}"
    return replace(table, name=name, title=f"{table.title}: {run.name}")


def _figures(runs: Sequence[Run]) -> dict[str, Figure]:
    figures = {"throughput": throughput_figure(runs), "times": times_figure(runs)}
    servers = cluster_figure(runs)
    if servers is not None:
        figures["cluster"] = servers
    return figures
