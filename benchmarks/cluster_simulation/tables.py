"""The simulation's results as tables: on the terminal, in Markdown and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.cluster_simulation.measures import NAMES, Measures
from benchmarks.cluster_simulation.scenarios import Cell

Columns = Sequence[tuple[str, Callable[[Measures], float], str]]

ROUTING_COLUMNS: Columns = (
    ("p50 s", lambda m: m.p50_s, ".2f"),
    ("p99 s", lambda m: m.p99_s, ".2f"),
    ("first token p50 s", lambda m: m.first_token_p50_s, ".2f"),
    ("p99 s ", lambda m: m.first_token_p99_s, ".2f"),
    ("per token p50 ms", lambda m: 1e3 * m.token_p50_s, ".1f"),
    ("p99 ms", lambda m: 1e3 * m.token_p99_s, ".1f"),
    ("goodput", lambda m: m.goodput, ".3f"),
    ("threads cv", lambda m: m.imbalance, ".2f"),
    ("max/mean", lambda m: m.max_over_mean, ".2f"),
    ("cached", lambda m: m.cached, ".2f"),
    ("preempted ‰", lambda m: m.preemptions, ".0f"),
)
FORKING_COLUMNS: Columns = (
    ("p50 s", lambda m: m.p50_s, ".2f"),
    ("p99 s", lambda m: m.p99_s, ".2f"),
    ("first token p99 s", lambda m: m.first_token_p99_s, ".2f"),
    ("step p50 ms", lambda m: 1e3 * m.step_p50_s, ".1f"),
    ("step p99 ms", lambda m: 1e3 * m.step_p99_s, ".1f"),
    ("per token p50 ms", lambda m: 1e3 * m.token_p50_s, ".1f"),
    ("p99 ms", lambda m: 1e3 * m.token_p99_s, ".1f"),
    ("goodput", lambda m: m.goodput, ".3f"),
    ("preempted ‰", lambda m: m.preemptions, ".0f"),
)
# Of these the interval is shown, where there are several seeds.
_WITH_INTERVAL = ("p50 s", "p99 s", "goodput")


def headings(columns: Columns) -> list[str]:
    """Names of the columns of a row."""
    return ["model", "replicas", "cluster", "load", "policy", *(name for name, _, _ in columns)]


def row(cell: Cell, columns: Columns) -> list[str]:
    """One cell's values as text."""
    scenario, summary = cell.scenario, cell.summary
    values = []
    for name, get, form in columns:
        text = format(get(summary.mean), form)
        if name in _WITH_INTERVAL and summary.num_seeds > 1:
            text += " ±" + format(get(summary.half_width), form)
        values.append(text)
    return [
        cell.model,
        str(scenario.replicas),
        scenario.name,
        f"{scenario.load:g}",
        cell.policy,
        *values,
    ]


def rich_table(title: str, cells: Sequence[Cell], columns: Columns) -> Table:
    """A table for the terminal, a line between scenarios."""
    table = Table(title=title)
    for number, name in enumerate(headings(columns)):
        table.add_column(name, justify="left" if number in (0, 2, 4) else "right")
    for number, cell in enumerate(cells):
        last = number + 1 == len(cells) or cells[number + 1].scenario != cell.scenario
        table.add_row(*row(cell, columns), end_section=last)
    return table


def markdown_table(cells: Sequence[Cell], columns: Columns) -> str:
    """The same in Markdown."""
    names = headings(columns)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(row(cell, columns)) + " |" for cell in cells]
    return "\n".join(lines) + "\n"


def write_csv(path: Path, cells: Sequence[Cell]) -> None:
    """All measures in full, with half the width of their 95 % intervals."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["model", "replicas", "cluster", "load", "policy", "seeds", *NAMES]
            + [f"{name}_half_width" for name in NAMES]
        )
        for cell in cells:
            scenario, summary = cell.scenario, cell.summary
            writer.writerow(
                [cell.model, scenario.replicas, scenario.name, scenario.load, cell.policy]
                + [summary.num_seeds]
                + [getattr(summary.mean, name) for name in NAMES]
                + [getattr(summary.half_width, name) for name in NAMES]
            )


GOAL_BELOW_POWER_OF_TWO = 0.25
GOAL_OVER_ORACLE = 0.10


def goal_table(cells: Sequence[Cell]) -> str:
    """Where the thread router keeps its goals: p99 against power of two choices and the oracle.

    Only the scenarios in which all three were run.
    """
    lines = [
        "| model | replicas | cluster | load | p99 latency vs power of two | vs oracle "
        "| p99 per token vs power of two | vs oracle | goals |",
        "|" + " --- |" * 9,
    ]
    by_place = {(cell.model, cell.scenario, cell.policy): cell.summary.mean for cell in cells}
    for (model, scenario, policy), ours in by_place.items():
        other = by_place.get((model, scenario, "power_of_two"))
        oracle = by_place.get((model, scenario, "oracle"))
        if policy != "threads" or other is None or oracle is None:
            continue
        against = [
            ours.p99_s / other.p99_s - 1,
            ours.p99_s / oracle.p99_s - 1,
            ours.token_p99_s / other.token_p99_s - 1,
            ours.token_p99_s / oracle.token_p99_s - 1,
        ]
        below = "below" if against[0] <= -GOAL_BELOW_POWER_OF_TWO else "not 25 % below"
        near = "near" if against[1] <= GOAL_OVER_ORACLE else "not near the oracle"
        shown = [f"{each:+.1%}" for each in against]
        place = [model, str(scenario.replicas), scenario.name, f"{scenario.load:g}"]
        lines.append("| " + " | ".join([*place, *shown, f"{below}, {near}"]) + " |")
    return "\n".join(lines) + "\n"
