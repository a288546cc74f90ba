"""A report as a folder: Markdown, one self-contained HTML page, CSV, JSON and figures."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apar_core.offline.evaluation.report_table import ReportTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@dataclass(frozen=True, slots=True)
class Report:
    """What is written: facts of the run, tables, and figures by the names of their files.

    `data` stands beside facts and tables in the JSON file.
    """

    title: str
    facts: Mapping[str, str]
    tables: Sequence[ReportTable]
    figures: Mapping[str, Figure]
    data: Mapping[str, Any]


def write_report(report: Report, folder: Path) -> Path:
    """Write the folder anew, answers and settings in it untouched; return the HTML page."""
    tables_folder = folder / "tables"
    tables_folder.mkdir(parents=True, exist_ok=True)
    for table in report.tables:
        (tables_folder / f"{table.name}.csv").write_text(table.as_csv(), encoding="utf-8")
    images = _save_figures(report, folder)
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


def file_name(text: str) -> str:
    """Return a text with everything replaced that is no good in the name of a file."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)


def _save_figures(report: Report, folder: Path) -> list[Path]:
    if not report.figures:
        return []
    # matplotlib takes a second to import.
    from apar_core.offline.evaluation.speed_plots import save_figure

    return [save_figure(figure, folder / name)[0] for name, figure in report.figures.items()]


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
