"""A table of a report, as Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Cell = str | float | None

_NONE = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `form` is a format specification for its numbers, as in format(1.5, ".1f")."""

    title: str
    form: str = ".1f"

    def show(self, cell: Cell) -> str:
        """Return a cell as a reader sees it."""
        if cell is None:
            return _NONE
        return cell if isinstance(cell, str) else format(cell, self.form)


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows under columns. `name` is that of its file; `note` says how to read it."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def without_empty(self, prefix: str) -> ReportTable:
        """Return the table without those columns of a title's beginning that have no value."""
        kept = [
            index
            for index, column in enumerate(self.columns)
            if not column.title.startswith(prefix)
            or any(row[index] is not None for row in self.rows)
        ]
        return replace(
            self,
            columns=tuple(self.columns[index] for index in kept),
            rows=tuple(tuple(row[index] for index in kept) for row in self.rows),
        )

    def shown_rows(self) -> list[list[str]]:
        """Return every cell as a reader sees it."""
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    @property
    def is_text(self) -> list[bool]:
        """Whether a column holds words, which stand on the left; numbers stand on the right."""
        return [
            any(isinstance(row[index], str) for row in self.rows)
            for index in range(len(self.columns))
        ]

    def as_markdown(self) -> str:
        """Return the table under a heading."""
        lines = [f"### {self.title}", ""]
        lines.append(_markdown_row([column.title for column in self.columns]))
        lines.append(_markdown_row([":--" if text else "--:" for text in self.is_text]))
        lines += [_markdown_row(row) for row in self.shown_rows()]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"

    def as_html(self) -> str:
        """Return the table with its title as caption."""
        kinds = ["text" if text else "number" for text in self.is_text]
        head = "".join(
            f'<th class="{kind}">{html.escape(column.title)}</th>'
            for kind, column in zip(kinds, self.columns, strict=True)
        )
        body = "\n".join(
            f"<tr{_row_class(row)}>"
            + "".join(
                f'<td class="{kind}">{html.escape(cell)}</td>'
                for kind, cell in zip(kinds, row, strict=True)
            )
            + "</tr>"
            for row in self.shown_rows()
        )
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f"<table><caption>{html.escape(self.title)}</caption>\n<thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody></table>\n{note}"
        )

    def as_data(self) -> dict[str, Any]:
        """Return the bare numbers for JSON."""
        return {
            "title": self.title,
            "columns": [column.title for column in self.columns],
            "rows": [list(row) for row in self.rows],
        }

    def as_csv(self) -> str:
        """Return the bare numbers, unrounded."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows(self.rows)
        return buffer.getvalue()


def _row_class(row: Sequence[str]) -> str:
    return ' class="mean"' if row[0].startswith("Mean") else ""


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
