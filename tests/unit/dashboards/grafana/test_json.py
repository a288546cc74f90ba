"""The committed JSON is current and valid by Grafana's schemas."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from dashboards.grafana import dashboards
from dashboards.grafana.generate import FOLDER, write
from tests.fakes.grafana import boards
from tests.unit.dashboards.grafana.schemas import FOLDER as SCHEMAS
from tests.unit.dashboards.grafana.schemas import needs_schemas, violations

Board = dict[str, Any]
BOARDS = boards()


def test_the_committed_json_is_current() -> None:
    committed = {file.stem: file.read_text() for file in FOLDER.glob("*.json")}

    assert committed == dashboards(), "run `make dashboards`"


def test_writing_removes_files_of_deleted_dashboards(tmp_path: Any) -> None:
    (tmp_path / "gone.json").write_text("{}")

    write(tmp_path)

    assert {file.stem for file in tmp_path.iterdir()} == set(dashboards())


@needs_schemas
@pytest.mark.parametrize("name", BOARDS)
def test_every_dashboard_is_valid(name: str) -> None:
    assert violations(BOARDS[name]) == []


@needs_schemas
def test_there_is_a_schema_for_every_type_of_panel() -> None:
    types = {panel["type"] for board in BOARDS.values() for panel in board["panels"]} - {"row"}

    known = {file.name.partition(".")[0] for file in SCHEMAS.iterdir()}
    assert types == {"gauge", "heatmap", "stat", "table", "timeseries"}
    assert types <= known


def first(board: Board, kind: str) -> Any:
    return next(panel for panel in board["panels"] if panel["type"] == kind)


def override(board: Board, kind: str, name: str, value: object) -> None:
    first(board, kind)["fieldConfig"]["overrides"].append(
        {"matcher": {"id": "byName", "options": "x"}, "properties": [{"id": name, "value": value}]}
    )


MISTAKES: dict[str, Callable[[Board], object]] = {
    "a field that dashboards do not have": lambda board: board.update(titel="x"),
    "a type of panel without a schema": lambda board: first(board, "stat").update(type="pie"),
    "a misspelt option": lambda board: first(board, "stat")["options"].update(colourMode="value"),
    "a value that an option does not take": lambda board: first(board, "stat")["options"].update(
        graphMode="curve"
    ),
    "an option that is missing": lambda board: first(board, "gauge")["options"].pop("sizing"),
    "a number as text": lambda board: first(board, "timeseries")["gridPos"].update(w="8"),
    "a misspelt property of lines": lambda board: first(board, "timeseries")["fieldConfig"][
        "defaults"
    ]["custom"].update(linewidth=1),
    "a format that queries do not have": lambda board: first(board, "table")["targets"][0].update(
        format="tabel"
    ),
    "a query without an expression": lambda board: first(board, "stat")["targets"][0].pop("expr"),
    "a field that queries do not have": lambda board: first(board, "stat")["targets"][0].update(
        expression="up"
    ),
    "a property that panels do not have": lambda board: override(
        board, "timeseries", "custom.axisPlace", "right"
    ),
    "a value that such a property does not take": lambda board: override(
        board, "timeseries", "custom.axisPlacement", "east"
    ),
    "a field option that does not exist": lambda board: override(board, "table", "units", "s"),
    "a kind of cell that does not exist": lambda board: override(
        board, "table", "custom.cellOptions", {"type": "colour-text"}
    ),
    "a kind of variable that does not exist": lambda board: board["templating"]["list"][0].update(
        type="source"
    ),
    "a colour mode that does not exist": lambda board: first(board, "stat")["fieldConfig"][
        "defaults"
    ].update(color={"mode": "rainbow"}),
}


@needs_schemas
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_schemas_find_a_mistake(mistake: str) -> None:
    board = copy.deepcopy(BOARDS["apar-overview"])

    MISTAKES[mistake](board)

    assert violations(board)
