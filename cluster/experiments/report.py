"""Writes what an experiment has shown: data, tables, a plot and a paragraph of result."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apar_core.errors import EvaluationError
from cluster.experiments.cells import Cell, CellStore, medians, write_data
from cluster.experiments.figures import FIGURE_5A, FIGURE_5B, MIXED, STRUCTURED
from cluster.experiments.goals import Goal, latency_goals, throughput_goals
from cluster.experiments.samples import LEAST_SAMPLES
from cluster.experiments.savings import attended_table, cached_table
from cluster.experiments.settings import ExperimentSettings, Mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from apar_core.reporting import ReportTable

TABLE_1 = "table1"
TABLE_2 = "table2"
_TABLE_MODE: Mode = "eager"
EXPERIMENTS = (FIGURE_5A, FIGURE_5B, TABLE_1, TABLE_2)

_COLUMNS = (
    "kv_share", "concurrency", "mode", "tokens_per_s", "p25", "p75", "kept_samples",
    "overall_tokens_per_s", "kv_tokens", "kv_capacity_tokens", "rows", "latency_s",
    "token_latency_ms", "step_ms", "steps", "computed_tokens", "preemptions",
    "forks", "forks_delayed", "wall_s",
)  # fmt: skip


def check_modes(experiments: Sequence[str], settings: ExperimentSettings) -> None:
    """Raise EvaluationError if a table is asked for without the mode that it is counted in."""
    tables = [name for name in experiments if name in (TABLE_1, TABLE_2)]
    if tables and _TABLE_MODE not in settings.modes:
        raise EvaluationError(
            f"--methods {','.join(settings.modes)} has no {_TABLE_MODE}: "
            f"{' and '.join(tables)} can only be counted in its runs"
        )


def write_experiment(
    experiment: str, store: CellStore, settings: ExperimentSettings, folder: Path
) -> Path:
    """Write the files of one experiment from its finished runs; return the page of result."""
    if experiment == FIGURE_5A:
        return _write_5a(store, settings, folder)
    if experiment == FIGURE_5B:
        return _write_5b(store, settings, folder)
    return _write_table(experiment, store, folder)


def _write_5a(store: CellStore, settings: ExperimentSettings, folder: Path) -> Path:
    from cluster.experiments.plots import throughput_figure

    traces = {name: store.all(FIGURE_5A, name) for name in (STRUCTURED, MIXED)}
    cells_of_trace = {name: cells for name, cells in traces.items() if cells}
    goals = [
        goal
        for mode in _forking_modes(settings)
        for goal in throughput_goals(traces[STRUCTURED], traces[MIXED], mode)
    ]
    return _write(
        FIGURE_5A,
        "Figure 5a: throughput against KV memory",
        cells_of_trace,
        throughput_figure({name: medians(cells) for name, cells in cells_of_trace.items()}),
        goals,
        settings,
        folder,
    )


def _write_5b(store: CellStore, settings: ExperimentSettings, folder: Path) -> Path:
    from cluster.experiments.plots import latency_figure

    cells = store.all(FIGURE_5B, STRUCTURED)
    goals = [goal for mode in _forking_modes(settings) for goal in latency_goals(cells, mode)]
    title = "Figure 5b: mean latency against concurrency"
    figure = latency_figure(medians(cells))
    return _write(FIGURE_5B, title, {STRUCTURED: cells}, figure, goals, settings, folder)


def _write(
    name: str,
    title: str,
    cells_of_trace: Mapping[str, Sequence[Cell]],
    figure: Figure,
    goals: Sequence[Goal],
    settings: ExperimentSettings,
    folder: Path,
) -> Path:
    from apar_core.reporting import save_figure

    save_figure(figure, folder / name)
    cells = [cell for each in cells_of_trace.values() for cell in each]
    write_data(cells, folder / f"{name}.json")
    _write_csv(cells, folder / f"{name}.csv")
    parts = [f"# {title}", _setting_line(settings), f"![{title}]({name}.png)", _goal_lines(goals)]
    parts += [_cell_table(trace, medians(each)) for trace, each in cells_of_trace.items()]
    return _write_page(folder / f"{name}.md", parts)


def _write_table(experiment: str, store: CellStore, folder: Path) -> Path:
    make = cached_table if experiment == TABLE_1 else attended_table
    tables: list[ReportTable] = []
    for trace in (STRUCTURED, MIXED):
        forked = [cell for cell in store.all(FIGURE_5A, trace) if cell.key.mode == _TABLE_MODE]
        if forked:
            # What is counted does not depend on the memory: any of the runs will do.
            tables.append(make(forked[-1]))
    for table in tables:
        path = folder / f"{experiment}-{table.note.split()[0]}.csv"
        path.write_text(table.as_csv(), encoding="utf-8")
    parts = [f"# {tables[0].title}", *(table.as_markdown() for table in tables)]
    return _write_page(folder / f"{experiment}.md", parts)


def _write_page(path: Path, parts: Sequence[str]) -> Path:
    path.write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return path


def _setting_line(settings: ExperimentSettings) -> str:
    return (
        f"Model {settings.model}; up to {settings.answers} answers of at most "
        f"{settings.max_tokens} tokens with their prompt; at most {settings.max_requests} "
        f"requests at once; samples every {settings.sample_s:g} s, the first third and those with "
        f"no request pending left out; where fewer than {LEAST_SAMPLES} are kept (kept_samples 0) "
        "the figures are of the whole run. All modes in one process, "
        f"{settings.order}; figures are medians over the rounds (column round of the CSV), a ratio "
        "is the median of those of two runs of one round. Every answer was compared with the text "
        "of the trace."
    )


def _goal_lines(goals: Sequence[Goal]) -> str:
    return "\n".join(f"- {goal.line}" for goal in goals)


def _row(cell: Cell) -> tuple[object, ...]:
    return (
        cell.key.kv_share, cell.key.concurrency, cell.key.mode, cell.throughput.mean,
        cell.throughput.p25, cell.throughput.p75, cell.kept_samples, cell.overall_tokens_per_s,
        cell.kv_tokens, cell.kv_capacity_tokens, cell.rows, cell.latency_s.mean,
        1000 * cell.token_latency_s, 1000 * cell.step_s, cell.steps, cell.computed_tokens,
        cell.preemptions, cell.forks, cell.forks_delayed, cell.wall_s,
    )  # fmt: skip


def _cell_table(trace: str, cells: Sequence[Cell]) -> str:
    lines = [f"## {trace} trace", ""]
    lines.append(f"| {' | '.join(_COLUMNS)} |")
    lines.append("|" + " --: |" * len(_COLUMNS))
    for cell in cells:
        lines.append("| " + " | ".join(_shown(value) for value in _row(cell)) + " |")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_csv(cells: Sequence[Cell], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("trace", "round", *_COLUMNS))
        writer.writerows((cell.key.trace, cell.key.round, *_row(cell)) for cell in cells)


def _forking_modes(settings: ExperimentSettings) -> list[Mode]:
    return [mode for mode in settings.modes if mode != "sequential"]
