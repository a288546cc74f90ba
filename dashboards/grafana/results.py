"""What Prometheus answers to the queries of panels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from dashboards.grafana.queries import PanelQuery, View, named

TIMEOUT_S = 60.0


class QueryError(Exception):
    """Prometheus refused a query."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series under the name of its legend, with (unix seconds, value) points in their order."""

    ref: str
    name: str
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """The newest value, which Grafana calls `lastNotNull`."""
        return self.points[-1][1]


def results(url: str, query: PanelQuery, view: View) -> list[Series]:
    """The series of one query, in Prometheus' order, as a panel would get them.

    Raises QueryError when Prometheus refuses it, httpx.HTTPError when it cannot be reached.
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


def ask(url: str, path: str, parameters: dict[str, str]) -> Any:
    """The data of an answer of Prometheus' API."""
    answer = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=TIMEOUT_S)
    content = answer.json()
    if content["status"] != "success":
        raise QueryError(f"{content['error']} ({parameters})")
    return content["data"]


def _points(series: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    pairs = series["values"] if "values" in series else [series["value"]]
    return tuple((float(time_s), float(value)) for time_s, value in pairs)
