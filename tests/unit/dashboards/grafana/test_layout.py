"""What schemas cannot check: positions, links, descriptions, units, variables."""

import re
from collections import Counter
from typing import Any

import pytest
from grafana_foundation_sdk.models import units

from tests.fakes.grafana import all_queries, boards, panels
from tests.fakes.rules import RULES

BOARDS = boards()
EVERY = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['id']}")
    for name, board in BOARDS.items()
    for panel in panels(board)
]
CHOICES = ("cluster", "namespace", "model", "replica")
VARIABLES = {"datasource", *CHOICES}
UNITS = {value for name, value in vars(units).items() if name[0].isupper()}


def cells(panel: dict[str, Any]) -> list[tuple[int, int]]:
    place = panel["gridPos"]
    return [
        (x, y)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]


@EVERY
def test_panels_neither_overlap_nor_exceed_the_grid(board: dict[str, Any]) -> None:
    taken = Counter(cell for panel in board["panels"] for cell in cells(panel))

    assert max(taken.values()) == 1
    assert max(x for x, _ in taken) == 23


@EVERY
def test_panel_ids_and_query_letters_are_unique(board: dict[str, Any]) -> None:
    assert max(Counter(panel["id"] for panel in board["panels"]).values()) == 1
    for panel in panels(board):
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_a_title_a_description_and_a_unit(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert re.search(r"[.:)]", panel["description"])
    used = {
        panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        or panel["options"]["yAxis"]["unit"]
    }
    for override in panel.get("fieldConfig", {}).get("overrides", []):
        used |= {each["value"] for each in override["properties"] if each["id"] == "unit"}
    assert used <= UNITS


RATE = re.compile(r"sum(?: by \([\w, ]+\))? \(rate\((\w+)_total\{[^}]*\}\[[^]]+\]\)\)")
"""A query that is the rate of one counter, and nothing else."""
COUNTED = {
    "tokens": "tokens/s",
    "blocks": "blocks/s",
    "rows": "rows/s",
    "steps": "steps/s",
    "joins": "joins/s",
    "fork": "forks/s",
    "decisions": "decisions/s",
    "batch_lines": "lines/s",
    "requests": units.RequestsPerSecond,
    "busy_seconds": units.PercentUnit,
}


def shown_units(panel: dict[str, Any], ref: str) -> set[str]:
    """What says the unit of a query's values: Grafana's unit, label of the axis, or a title."""
    config, title, matcher = panel["fieldConfig"], panel["title"], ("byFrameRefID", ref)
    if panel["type"] == "table":
        [organize] = [each for each in panel["transformations"] if each["id"] == "organize"]
        title = organize["options"]["renameByName"][f"Value #{ref}"]
        matcher = ("byName", title)
    found = {
        "unit": config["defaults"]["unit"],
        "custom.axisLabel": config["defaults"].get("custom", {}).get("axisLabel", ""),
    }
    for override in config["overrides"]:
        if (override["matcher"]["id"], override["matcher"]["options"]) == matcher:
            found |= {each["id"]: each["value"] for each in override["properties"]}
    return {found["unit"], found["custom.axisLabel"], *title.lower().split()}


@pytest.mark.parametrize("panel", PANELS)
def test_every_rate_shows_what_it_counts_per_second(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        if (rate := RATE.fullmatch(target["expr"])) is not None:
            unit = next(unit for word, unit in COUNTED.items() if word in rate[1])
            assert unit in shown_units(panel, target["refId"]), target["expr"]


@pytest.mark.parametrize("panel", PANELS)
def test_thresholds_are_sorted(panel: dict[str, Any]) -> None:
    field = panel.get("fieldConfig", {}).get("defaults", {})
    if "thresholds" not in field:
        assert panel["type"] == "heatmap"
        return
    steps = [step["value"] for step in field["thresholds"]["steps"]]

    assert steps[0] is None
    assert steps[1:] == sorted(steps[1:])


@EVERY
def test_everything_uses_the_selected_data_source(board: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asked = panels(board)
    asked += [target for panel in asked for target in panel["targets"]]
    asked += board["annotations"]["list"]
    asked += [each for each in board["templating"]["list"] if each["type"] == "query"]

    assert {tuple(sorted(each["datasource"].items())) for each in asked} == {
        tuple(sorted(chosen.items()))
    }


@EVERY
def test_each_dashboard_has_the_same_variables(board: dict[str, Any]) -> None:
    variables = {each["name"]: each for each in board["templating"]["list"]}

    assert set(variables) == VARIABLES
    assert variables["datasource"]["query"] == "prometheus"
    for name in CHOICES:
        assert variables[name]["includeAll"]
        assert variables[name]["multi"]
        assert variables[name]["refresh"] == 2  # with the range: replicas come and go


@EVERY
def test_dashboards_link_to_each_other_and_keep_the_selection(board: dict[str, Any]) -> None:
    [link] = board["links"]

    assert link["type"] == "dashboards"
    # Without tags the link would lead to every dashboard of the Grafana.
    assert set(link["tags"]) & set(board["tags"]) == set(link["tags"]) != set()
    assert link["includeVars"]
    assert link["keepTime"]


def test_links_in_panels_lead_to_existing_dashboards() -> None:
    urls = re.findall(r"/d/([\w-]+)/", str(list(BOARDS.values())))

    assert "apar-forks" in urls
    assert set(urls) <= set(BOARDS)
    assert {name: board["uid"] for name, board in BOARDS.items()} == {name: name for name in BOARDS}


@EVERY
def test_refresh_interval_and_default_range(board: dict[str, Any]) -> None:
    assert board["refresh"] == "30s"
    assert board["time"]["from"] == "now-1h"


def test_the_overview_has_the_numbers_of_the_objectives_and_the_alert() -> None:
    rules = "".join(rule["expr"] for rule in RULES)
    overview = [query for query in all_queries() if query.dashboard == "apar-overview"]
    slow = [query for query in overview if query.panel["title"].endswith("budget left")][1:]
    burns = [query for query in overview if "Burn rate" in query.panel["title"]]

    for query in slow:
        [bound] = re.findall(r"\w+_bucket\{.*(le=\"[^\"]+\")", query.expression)
        assert f"{query.expression.partition('increase(')[2].partition('{')[0]}{{{bound}}}" in rules
    for query in burns:
        record, budget = re.findall(r"(model:\w+:\w+)|/ ([\d.]+)$", query.expression)
        assert f"{record[0]} > 14.4 * {budget[1]} " in rules
    assert len(slow) == 2
    assert len(burns) == 3
    [gauge] = [panel for panel in panels(BOARDS["apar-overview"]) if panel["type"] == "gauge"]
    limit = gauge["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
    assert f"model_replica:apar_kv_cache_usage:ratio > {limit}" in rules
