"""Queries the dashboards' panels as Grafana does, and reads Prometheus' answers.

Source of the intervals: Grafana's documentation of `$__interval` and `$__rate_interval`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from dashboards.grafana import dashboards

POINTS = 1000
"""Number of points that a panel requests; Grafana takes its width in pixels."""
TIMEOUT_S = 60.0


class QueryError(Exception):
    """Prometheus rejected a query."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """Query of a panel, with variables."""

    dashboard: str
    panel: Mapping[str, Any]
    ref: str
    expression: str
    legend: str
    instant: bool

    @property
    def place(self) -> str:
        """Dashboard, panel and letter of the query."""
        return f"{self.dashboard} / {self.panel['title']} / {self.ref}"


@dataclass(frozen=True, slots=True)
class View:
    """Time range in Unix seconds and selected values of the variables.

    A variable without selected values is set to "All". `scrape_s` is the data source's interval.
    """

    start_s: float
    end_s: float
    scrape_s: float = 15.0
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def interval_s(self) -> float:
        """`$__interval`: the distance between points, at least the scrape interval."""
        return max((self.end_s - self.start_s) / POINTS, self.scrape_s)

    def expression(self, raw: str) -> str:
        """Replace all variables in an expression.

        Raises KeyError for a variable that no dashboard has.
        """
        rate_s = max(self.interval_s + self.scrape_s, 4 * self.scrape_s)
        values = {
            "__interval": _duration(self.interval_s),
            "__rate_interval": _duration(rate_s),
            "__range": _duration(self.end_s - self.start_s),
        }
        for variable in ("cluster", "namespace", "model", "replica"):
            values[variable] = _pattern(self.chosen.get(variable, ()))
        return re.sub(r"\$(\w+)", lambda found: values[found[1]], raw)


@dataclass(frozen=True, slots=True)
class Series:
    """Series named by its legend, with (Unix seconds, value) points in order."""

    ref: str
    name: str
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """The newest value; Grafana calls it `lastNotNull`."""
        return self.points[-1][1]


def boards() -> dict[str, dict[str, Any]]:
    """All dashboards, parsed from their JSON."""
    return {name: json.loads(text) for name, text in dashboards().items()}


def panels(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All panels but the headings of rows, in order."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def all_queries() -> list[PanelQuery]:
    """Queries of all panels of all dashboards."""
    return [
        PanelQuery(
            dashboard=board["uid"],
            panel=panel,
            ref=target["refId"],
            expression=target["expr"],
            legend=target.get("legendFormat", ""),
            instant=target["instant"],
        )
        for board in boards().values()
        for panel in panels(board)
        for target in panel["targets"]
    ]


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Fill a legend with the labels of a series."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend)


def results(url: str, query: PanelQuery, view: View) -> list[Series]:
    """Return the series of a query, in Prometheus' order.

    Raises QueryError when Prometheus rejects the query.
    """
    expression = view.expression(query.expression)
    if query.instant:
        found = ask(url, "query", {"query": expression, "time": str(view.end_s)})["result"]
    else:
        step_s = view.interval_s
        # Grafana aligns a range with its steps, so that panels do not flicker.
        start_s, end_s = (bound // step_s * step_s for bound in (view.start_s, view.end_s))
        times = {"start": str(start_s), "end": str(end_s), "step": str(step_s)}
        found = ask(url, "query_range", {"query": expression} | times)["result"]
    return [
        Series(query.ref, named(query.legend, each["metric"]), each["metric"], _points(each))
        for each in found
    ]


def replicas_alive(url: str, view: View) -> list[str]:
    """Values of the variable `replica`."""
    board = next(iter(boards().values()))
    [variable] = [each for each in board["templating"]["list"] if each["name"] == "replica"]
    query = variable["query"].removeprefix("query_result(").removesuffix(")")
    parameters = {"query": view.expression(query), "time": str(view.end_s)}
    return sorted(each["metric"]["replica"] for each in ask(url, "query", parameters)["result"])


def ask(url: str, path: str, parameters: dict[str, str]) -> Any:
    """Return the `data` of a response of Prometheus' API."""
    content = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=TIMEOUT_S).json()
    if content["status"] != "success":
        raise QueryError(f"{content['error']} ({parameters})")
    return content["data"]


def _points(series: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    pairs = series["values"] if "values" in series else [series["value"]]
    return tuple((float(time_s), float(value)) for time_s, value in pairs)


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _pattern(chosen: tuple[str, ...]) -> str:
    """Write the values of a variable as a regular expression, as Grafana does."""
    if not chosen:
        return ".*"
    escaped = [re.sub(r"([\\^$*+?.()|\[\]{}])", r"\\\\\1", value) for value in chosen]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
