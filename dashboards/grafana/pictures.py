"""Dashboards as pictures: `python -m dashboards.grafana.pictures PROMETHEUS_URL FOLDER`.

Draws every panel of the committed JSON where Grafana would place it, with what its queries return
from a Prometheus, to see without a Grafana whether units, legends and scales make sense. One PNG a
dashboard.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dashboards.grafana.drawing import figures, plots
from dashboards.grafana.drawing.style import PAGE, PANEL, TEXT
from dashboards.grafana.queries import View, boards, queries
from dashboards.grafana.results import Series, ask, results

DRAW = {
    "bargauge": figures.bargauge,
    "gauge": figures.gauge,
    "heatmap": plots.heatmap,
    "stat": figures.stat,
    "table": figures.table,
    "timeseries": plots.timeseries,
}
# Columns left of an axis, and rows below, for its labels and legend.
MARGINS = {
    "bargauge": (2.6, 0.3),
    "gauge": (0.5, 0.3),
    "heatmap": (0.9, 1.0),
    "stat": (0.2, 0.2),
    "table": (0.2, 0.2),
    "timeseries": (0.9, 1.6),
}
COLUMNS = 24
COLUMN_INCHES = 0.78
ROW_INCHES = 0.36


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel (or a row's heading), the rows from the top where it begins, and its view."""

    panel: Mapping[str, Any]
    top: int
    view: View
    title: str


def draw(url: str, board: Mapping[str, Any], view: View, file: Path) -> None:
    """One dashboard, its repeated rows once for each replica that lives at the range's end."""
    placed = list(_placed(board, view, replicas_alive(url, view)))
    height = max(each.top + each.panel["gridPos"]["h"] for each in placed)
    figure = plt.figure(figsize=(COLUMNS * COLUMN_INCHES, height * ROW_INCHES), facecolor=PAGE)
    for each in placed:
        if each.panel["type"] == "row":
            place = 1 - (each.top + 0.7) / height
            figure.text(0.005, place, each.title, color=TEXT, fontsize=12, weight="bold")
        else:
            of_panel = [query for query in queries(board) if query.panel is each.panel]
            found = [series for query in of_panel for series in results(url, query, each.view)]
            _draw_panel(figure, each, found, height)
    figure.savefig(file, dpi=80, facecolor=PAGE)
    plt.close(figure)


def replicas_alive(url: str, view: View) -> list[str]:
    """Values of the dashboards' variable `replica`."""
    board = next(iter(boards().values()))
    [variable] = [each for each in board["templating"]["list"] if each["name"] == "replica"]
    query = variable["query"].removeprefix("query_result(").removesuffix(")")
    parameters = {"query": view.expression(query), "time": str(view.end_s)}
    return sorted(each["metric"]["replica"] for each in ask(url, "query", parameters)["result"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of a Prometheus, http://HOST:PORT")
    parser.add_argument("folder", type=Path, help="where the PNGs go")
    parser.add_argument("--minutes", type=float, default=60, help="length of the range")
    parser.add_argument("--scrape-s", type=float, default=15, help="interval of the scrapes")
    given = parser.parse_args(arguments)
    now_s = time.time()
    view = View(now_s - 60 * given.minutes, now_s, scrape_s=given.scrape_s)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, board in boards().items():
        draw(given.url, board, view, given.folder / f"{name}.png")


def _placed(board: Mapping[str, Any], view: View, replicas: Sequence[str]) -> Iterator[Placed]:
    """Every panel, those of a repeated row once for each replica."""
    shift = 0
    for row in _rows(board):
        heading = row[0]
        height = max(_bottom(panel) for panel in row) - heading["gridPos"]["y"]
        values = replicas if heading.get("repeat") else [""]
        for number, value in enumerate(values):
            shift += height if number else 0
            seen = view.of("replica", value) if value else view
            title = heading["title"].replace("$replica", value)
            for panel in row:
                yield Placed(panel, panel["gridPos"]["y"] + shift, seen, title)


def _rows(board: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """Each row's heading and panels."""
    row: list[Mapping[str, Any]] = []
    for panel in board["panels"]:
        if panel["type"] == "row" and row:
            yield row
            row = []
        row.append(panel)
    yield row


def _bottom(panel: Mapping[str, Any]) -> int:
    return int(panel["gridPos"]["y"] + panel["gridPos"]["h"])


def _draw_panel(figure: Figure, placed: Placed, found: list[Series], height: int) -> None:
    panel, place = placed.panel, placed.panel["gridPos"]
    left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
    bottom, tall = 1 - (placed.top + place["h"]) / height, place["h"] / height
    row, column = 1 / height, 1 / COLUMNS
    box = (left + 0.06 * column, bottom + 0.08 * row)
    size = (width - 0.12 * column, tall - 0.16 * row)
    figure.add_artist(Rectangle(box, *size, color=PANEL, transform=figure.transFigure, zorder=-1))
    top = 1 - (placed.top + 0.7) / height
    figure.text(left + 0.2 * column, top, panel["title"], color=TEXT, fontsize=9, weight="bold")
    axis, below = MARGINS[panel["type"]]
    axes = figure.add_axes(
        (
            left + axis * column,
            bottom + below * row,
            width - (axis + _right_margin(panel)) * column,
            tall - (below + 1.1) * row,
        )
    )
    if found:
        DRAW[panel["type"]](axes, panel, found)
    else:
        figures.empty(axes)
        text = panel["fieldConfig"]["defaults"].get("noValue", "No data")
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=TEXT, fontsize=11)


def _right_margin(panel: Mapping[str, Any]) -> float:
    return 1.2 if "custom.axisPlacement" in str(panel.get("fieldConfig")) else 0.5


if __name__ == "__main__":
    main()
