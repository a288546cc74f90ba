"""Tables 1 and 2 of the paper from the runs of figure 5a: cached and attended tokens saved."""

from __future__ import annotations

from collections.abc import Callable

from apar_core.reporting import Column, ReportTable
from cluster.experiments.cells import CategoryCounts, Cell

# The paper leaves these out of the mean, since its models do not fork there.
_LEFT_OUT = ("coding", "extraction", "math")
_SMALLEST_CATEGORY = 3


def cached_table(cell: Cell) -> ReportTable:
    """Return table 1: the most KV slots that an answer takes, on average."""
    return _table(
        cell,
        "table1",
        "Table 1: average max cached tokens",
        lambda counts: (
            counts.max_cached_tokens / counts.answers,
            counts.sequential_max_cached_tokens / counts.answers,
        ),
    )


def attended_table(cell: Cell) -> ReportTable:
    """Return table 2: the tokens that a predicted one attends to, on average."""
    return _table(
        cell,
        "table2",
        "Table 2: average attended tokens",
        lambda counts: (
            counts.attended_tokens / counts.predicted_tokens,
            counts.sequential_attended_tokens / counts.sequential_predicted_tokens,
        ),
    )


def _table(
    cell: Cell, name: str, title: str, values: Callable[[CategoryCounts], tuple[float, float]]
) -> ReportTable:
    rows: list[tuple[str | float | None, ...]] = []
    small = CategoryCounts()
    forking = CategoryCounts()
    for category, counts in sorted(cell.categories.items()):
        if category.lower() not in _LEFT_OUT:
            forking = _sum(forking, counts)
        if counts.answers < _SMALLEST_CATEGORY:
            small = _sum(small, counts)
        else:
            rows.append(_row(category, counts, values))
    if small.answers:
        rows.append(_row("others", small, values))
    if forking.answers:
        rows.append(_row("Mean", forking, values))
    columns = ("category", "answers", "threads", "APAR", "flatten", "saved %")
    return ReportTable(
        name,
        title,
        tuple(Column(column, ".0f" if column == "answers" else ".1f") for column in columns),
        tuple(rows),
        f"{cell.key.trace} trace, {cell.key.mode}, {cell.key.kv_share:g} of the KV cache. The mean "
        f"is over all answers without those on {', '.join(_LEFT_OUT)}, as in the paper.",
    )


def _row(
    category: str, counts: CategoryCounts, values: Callable[[CategoryCounts], tuple[float, float]]
) -> tuple[str | float | None, ...]:
    forked, flat = values(counts)
    threads = counts.threads / counts.answers
    return category, float(counts.answers), threads, forked, flat, 100 * (1 - forked / flat)


def _sum(one: CategoryCounts, other: CategoryCounts) -> CategoryCounts:
    return CategoryCounts(
        **{name: getattr(one, name) + getattr(other, name) for name in CategoryCounts.model_fields}
    )
