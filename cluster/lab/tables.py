"""Tables whose columns say where their values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from apar_core.reporting import Cell, Column, ReportTable


class Value(NamedTuple):
    """A column: its title, the format of its numbers, and its value in a row."""

    title: str
    form: str
    of: Callable[[Any], Cell]


def table_of(
    name: str, title: str, rows: Iterable[Any], values: Sequence[Value], note: str = ""
) -> ReportTable:
    """Return a table with a row for each object; text columns need no format."""
    columns = tuple(Column(each.title, each.form) for each in values)
    cells = tuple(tuple(each.of(row) for each in values) for row in rows)
    return ReportTable(name, title, columns, cells, note)
