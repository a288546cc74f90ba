"""Reports of evaluations, load tests and experiments, their folders and their progress.

A report folder has Markdown, one self-contained HTML page, CSV, JSON and figures.
"""

from __future__ import annotations

import base64
import csv
import errno
import fcntl
import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TextIO, TypeVar

from pydantic import BaseModel

from apar_core.errors import EvaluationError
from apar_core.json_lines import append_line, read_finished_lines
from apar_core.whole_files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTINGS_FILE = "run.json"

RUN_COLOURS = ("#2f6f9f", "#d1602b", "#4b8b3b", "#8a5a9e", "#b08d1e", "#50707a")
# Text stays text in an SVG, so it can be searched. The fixed salt makes the files reproducible.
PLOT_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "apar-serve",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; }
table { border-collapse: collapse; margin: 1.8rem 0 .4rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .22rem .8rem; border-bottom: 1px solid #e4e7eb; }
th { border-bottom: 2px solid #9aa5b1; font-weight: 600; }
.number { text-align: right; } .text { text-align: left; }
tr.mean td { font-weight: 600; background: #f5f7fa; }
img { max-width: 100%; margin-top: 1.5rem; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
p { color: #52606d; margin: .2rem 0; }
.wide { overflow-x: auto; }
""".strip()

Cell = str | float | None
Key = TypeVar("Key")
Line = TypeVar("Line", bound=BaseModel)


class ShowProgress(Protocol):
    """Progress display of a run's stages; implemented by the command line."""

    def start(self, stage: str, total: int, done: int = 0) -> Callable[[], None]:
        """Begin a stage of `total` steps, `done` of them earlier; return what each step calls."""


@dataclass(frozen=True, slots=True)
class Column:
    """Table column; `form` is the format specification of its numbers, such as ".1f"."""

    title: str
    form: str = ".1f"

    def show(self, cell: Cell) -> str:
        """Format a cell; None becomes a dash."""
        if cell is None:
            return "-"
        return cell if isinstance(cell, str) else format(cell, self.form)


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Table of a report. `name` is its file name without suffix, `note` a line below it."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def without_empty(self, prefix: str) -> ReportTable:
        """Drop the columns whose title starts with `prefix` and that have no value."""
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
        """Return all cells formatted."""
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    @property
    def is_text(self) -> list[bool]:
        """Whether each column holds text, which is aligned left; numbers are aligned right."""
        return [
            any(isinstance(row[index], str) for row in self.rows)
            for index in range(len(self.columns))
        ]

    def as_markdown(self) -> str:
        """Return the table below a heading."""
        lines = [f"### {self.title}", ""]
        lines.append(_markdown_row([column.title for column in self.columns]))
        lines.append(_markdown_row([":--" if text else "--:" for text in self.is_text]))
        lines += [_markdown_row(row) for row in self.shown_rows()]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"

    def as_html(self) -> str:
        """Return the table with its title as the caption."""
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
        """Return title, column titles and unformatted rows for JSON."""
        return {
            "title": self.title,
            "columns": [column.title for column in self.columns],
            "rows": [list(row) for row in self.rows],
        }

    def as_csv(self) -> str:
        """Return the unrounded values as CSV."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows(self.rows)
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Report:
    """Facts of a run, tables, and figures by file name.

    `data` is written to the JSON file next to facts and tables.
    """

    title: str
    facts: Mapping[str, str]
    tables: Sequence[ReportTable]
    figures: Mapping[str, Figure]
    data: Mapping[str, Any]


def write_report(report: Report, folder: Path) -> Path:
    """Write the report's files, leave other files in the folder alone; return the HTML page."""
    tables_folder = folder / "tables"
    tables_folder.mkdir(parents=True, exist_ok=True)
    for table in report.tables:
        (tables_folder / f"{table.name}.csv").write_text(table.as_csv(), encoding="utf-8")
    images = [save_figure(figure, folder / name)[0] for name, figure in report.figures.items()]
    data = {
        "facts": dict(report.facts),
        "tables": {table.name: table.as_data() for table in report.tables},
        **report.data,
    }
    (folder / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (folder / "report.md").write_text(_markdown(report, images), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(_html(report, images), encoding="utf-8")
    return page


def save_figure(figure: Figure, path_without_suffix: Path) -> list[Path]:
    """Write a figure as PNG and SVG; return both paths."""
    # matplotlib takes a second to import.
    import matplotlib as mpl

    paths = [path_without_suffix.with_suffix(suffix) for suffix in (".png", ".svg")]
    with mpl.rc_context(PLOT_SETTINGS):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def claim_folder(folder: Path, settings: Mapping[str, str]) -> bool:
    """Record a run's settings in its folder; return whether the run was started there before.

    Until it ends, this process keeps other processes out of the folder. Raises EvaluationError if
    one is in it, or if the folder holds a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _keep_others_out(folder)
    path = folder / SETTINGS_FILE
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EvaluationError(f"{path} is damaged: {error}") from error
        differing = [
            f"{name} was {found.get(name)!r}, is {value!r}"
            for name, value in settings.items()
            if found.get(name) != value
        ]
        if differing:
            raise EvaluationError(
                f"{folder} holds another run ({'; '.join(differing)}): give another --out"
            )
        return True
    replace_file(path, json.dumps(dict(settings), indent=1))
    return False


# Kept open: a process loses a lock when it closes the file.
_locks: dict[Path, TextIO] = {}


def _keep_others_out(folder: Path) -> None:
    path = (folder / ".lock").resolve()
    if path in _locks:
        return
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        # Other errors come from file systems without locks.
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise EvaluationError(
                f"another process writes to {folder}: wait for its end, or give another --out"
            ) from error
    else:
        _locks[path] = file


class LineStore(Generic[Key, Line]):
    """Results of one folder: models by their key, in memory and in a JSON lines file."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, str],
        model: type[Line],
        key_of: Callable[[Line], Key],
    ) -> None:
        """Open the file. Raises EvaluationError if other settings are those of its folder.

        What is refused before a first line is kept leaves the folder free for another try.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_others_out(path.parent)
        if (path.parent / SETTINGS_FILE).is_file():
            claim_folder(path.parent, settings)
        self._settings = settings
        self._path = path
        self._key_of = key_of
        self.lines = {key_of(line): line for line in read_finished_lines(path, model)}

    def add(self, line: Line) -> None:
        """Append a result."""
        if not self.lines:
            claim_folder(self._path.parent, self._settings)
        append_line(self._path, line)
        self.lines[self._key_of(line)] = line

    def sort(self) -> None:
        """Rewrite the file in the order of the keys, whichever line was added first."""
        ordered = sorted(self.lines.items(), key=lambda item: str(item[0]))
        self.lines = dict(ordered)
        content = "".join(f"{line.model_dump_json()}\n" for _, line in ordered)
        replace_file(self._path, content)


def file_name(text: str) -> str:
    """Replace all characters but letters, digits, dots and hyphens by hyphens."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)


def _markdown(report: Report, images: Sequence[Path]) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in report.facts.items())
    figures = "\n".join(f"![{image.stem}]({image.name})" for image in images)
    tables = "\n".join(table.as_markdown() for table in report.tables)
    parts = [f"# {report.title}", facts, figures, tables]
    return "\n\n".join(part for part in parts if part).rstrip() + "\n"


def _html(report: Report, images: Sequence[Path]) -> str:
    facts = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in report.facts.items()
    )
    figures = "\n".join(
        f'<img alt="{html.escape(image.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(image.read_bytes()).decode()}">'
        for image in images
    )
    tables = "\n".join(f'<div class="wide">{table.as_html()}</div>' for table in report.tables)
    title = html.escape(report.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<dl>{facts}</dl>\n"
        f"{figures}\n{tables}\n</body></html>\n"
    )


def _row_class(row: Sequence[str]) -> str:
    return ' class="mean"' if row[0].startswith("Mean") else ""


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
