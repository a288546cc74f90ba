"""Pictures show values, colours and places as the JSON says."""

from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from cluster.local_ray import free_port
from dashboards.grafana import pictures
from dashboards.grafana.drawing import figures, plots
from dashboards.grafana.drawing.style import COLOURS, shown, threshold_colour
from dashboards.grafana.queries import View, boards
from dashboards.grafana.results import Series

BOARDS = boards()


def panel(board: str, title: str) -> Any:
    return next(each for each in BOARDS[board]["panels"] if each["title"] == title)


def series(name: str, *values: float, ref: str = "A", **labels: str) -> Series:
    return Series(ref, name, labels, tuple((15.0 * place, v) for place, v in enumerate(values)))


@pytest.fixture
def axes() -> Any:
    figure, drawn = plt.subplots()
    yield drawn
    plt.close(figure)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0123, "percentunit", "1.23%"),
        (0.25, "s", "250 ms"),
        (0.000012, "s", "12 µs"),
        (90.0, "s", "1.5 min"),
        (0.0, "s", "0 s"),
        (12.34, "reqps", "12.3 req/s"),
        (1234.0, "short", "1.23 K"),
        (0.5, "short", "0.5"),
        (float("nan"), "short", "NaN"),
    ],
)
def test_values_are_written_as_grafana_writes_them(value: float, unit: str, expected: str) -> None:
    assert shown(value, unit) == expected


def test_a_value_has_the_colour_of_the_last_threshold_that_it_reaches() -> None:
    field = panel("apar-overview", "KV cache")["fieldConfig"]["defaults"]

    colours = [threshold_colour(value, field) for value in (0.5, 0.85, 0.99)]
    assert colours == [COLOURS["green"], COLOURS["orange"], COLOURS["red"]]


def test_a_stack_ends_at_the_sum(axes: Axes) -> None:
    stacked = panel("apar-forks", "Threads by state")

    plots.timeseries(axes, stacked, [series("running", 1, 2), series("waiting", 3, 4)])

    [running, waiting] = axes.collections
    tops = [area.get_paths()[0].get_extents().y1 for area in (running, waiting)]
    assert tops == [2, 6]
    assert to_hex(np.asarray(running.get_facecolor())[0]).upper() == COLOURS["green"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["running", "waiting"]


def test_a_line_has_a_gap_where_points_are_missing(axes: Axes) -> None:
    steps = panel("apar-forks", "Steps")
    points = ((0.0, 1.0), (15.0, 2.0), (60.0, 3.0))

    plots.timeseries(axes, steps, [Series("A", "m", {}, points)])

    values = np.asarray(axes.lines[0].get_ydata())
    assert np.isnan(values).tolist() == [False, False, True, False]


def test_a_query_may_have_its_axis_on_the_right(axes: Axes) -> None:
    both = panel("apar-figure5", "Throughput and KV use over time")

    plots.timeseries(axes, both, [series("a", 100, 200), series("b", 0.1, 0.2, ref="B")])

    [left, right] = axes.figure.axes
    assert [len(each.lines) for each in (left, right)] == [1, 1]
    assert right.yaxis.get_major_formatter()(0.2) == "20%"


def test_a_heat_map_takes_cumulative_buckets_apart(axes: Axes) -> None:
    cumulative = [
        series("+Inf", 5, 5, le="+Inf"),
        series("1", 2, 1, le="1"),
        series("2", 5, 3, le="2"),
    ]

    plots.heatmap(axes, panel("apar-forks", "Threads per request"), cumulative)

    [mesh] = axes.collections
    counts = mesh.get_array()
    assert counts is not None
    assert counts.tolist() == [[2, 1], [3, 2], [0, 2]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "+Inf"]


def test_a_figure_is_the_newest_value(axes: Axes) -> None:
    figures.stat(axes, panel("apar-overview", "Requests"), [series("", 3, 4, 2)])

    assert texts(axes) == ["2 req/s"]


def test_a_table_joins_queries_by_their_labels(axes: Axes) -> None:
    table = panel("apar-figure5", "Latency by concurrency: spread")
    answers = [
        series("", 0.5, ref="A", model="m", concurrency="16"),
        series("", 0.25, ref="A", model="m", concurrency="2"),
        series("", 0.01, ref="D", model="m", concurrency="2"),
    ]

    figures.table(axes, table, answers)

    [drawn] = axes.tables
    cells = drawn.get_celld()
    rows = [[cells[row, column].get_text().get_text() for column in range(6)] for row in range(3)]
    assert rows == [
        ["Model", "Requests from", "Mean", "25 %", "75 %", "Per token"],
        ["m", "2", "250 ms", "", "", "10 ms"],
        ["m", "16", "500 ms", "", "", ""],
    ]


def test_a_repeated_row_stands_once_for_each_replica() -> None:
    placed = list(pictures._placed(BOARDS["apar-replicas"], View(0, 1), ["a", "b"]))

    headings = [each for each in placed if each.panel["type"] == "row"]
    assert [each.title for each in headings] == ["Replica a", "Replica b"]
    assert headings[1].top == max(
        each.top + each.panel["gridPos"]["h"] for each in placed[: len(placed) // 2]
    )
    assert placed[-1].view.expression("$replica") == "b"


def test_every_type_of_panel_can_be_drawn() -> None:
    types = {each["type"] for board in BOARDS.values() for each in board["panels"]} - {"row"}

    assert types == set(pictures.DRAW) == set(pictures.MARGINS)


def test_without_a_prometheus_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(httpx.ConnectError):
        pictures.main([f"http://127.0.0.1:{free_port()}", str(tmp_path)])

    assert list(tmp_path.iterdir()) == []
