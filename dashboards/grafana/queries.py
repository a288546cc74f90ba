"""Queries of a dashboard as Grafana sends them to Prometheus.

Source of the intervals: Grafana's documentation of `$__interval` and `$__rate_interval`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dashboards.grafana.generate import dashboards

POINTS = 1000
"""How many points a panel asks for at most; Grafana takes its width in pixels."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel, variables not yet replaced; `repeat` is the variable of its row."""

    dashboard: str
    panel: Mapping[str, Any]
    ref: str
    expression: str
    legend: str
    instant: bool
    repeat: str | None

    @property
    def place(self) -> str:
        """Where to find it."""
        return f"{self.dashboard} / {self.panel['title']} / {self.ref}"


@dataclass(frozen=True, slots=True)
class View:
    """What Grafana knows when somebody looks: a range, in unix seconds, and chosen values.

    A variable without chosen values stands at "All". `scrape_s` is the data source's interval.
    """

    start_s: float
    end_s: float
    scrape_s: float = 15.0
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def interval_s(self) -> float:
        """`$__interval`: the distance of points, not below that of scrapes."""
        return max((self.end_s - self.start_s) / POINTS, self.scrape_s)

    def of(self, variable: str, value: str) -> "View":
        """The view in a row that is repeated for a value."""
        return replace(self, chosen={**self.chosen, variable: (value,)})

    def expression(self, raw: str) -> str:
        """The expression with every variable replaced.

        Raises KeyError for a variable that no dashboard has.
        """
        rate_s = max(self.interval_s + self.scrape_s, 4 * self.scrape_s)
        values = {
            "__interval": duration(self.interval_s),
            "__rate_interval": duration(rate_s),
            "__range": duration(self.end_s - self.start_s),
        }
        for variable in ("model", "replica"):
            values[variable] = _pattern(self.chosen.get(variable, ()))
        return re.sub(r"\$(\w+)", lambda found: values[found[1]], raw)


def duration(seconds: float) -> str:
    """Prometheus' spelling, to the millisecond."""
    return f"{round(seconds * 1000)}ms"


def boards() -> dict[str, dict[str, Any]]:
    """The dashboards as read from their JSON."""
    return {name: json.loads(text) for name, text in dashboards().items()}


def panels(board: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Panels in their order, each with the variable that its row is repeated for."""
    repeat = None
    for panel in board["panels"]:
        if panel["type"] == "row":
            repeat = panel.get("repeat")
        else:
            yield panel, repeat


def queries(board: Mapping[str, Any]) -> Iterator[PanelQuery]:
    """All queries of a dashboard's panels."""
    for panel, repeat in panels(board):
        for target in panel["targets"]:
            yield PanelQuery(
                dashboard=board["uid"],
                panel=panel,
                ref=target["refId"],
                expression=target["expr"],
                legend=target.get("legendFormat", ""),
                instant=target["instant"],
                repeat=repeat,
            )


def all_queries() -> list[PanelQuery]:
    """Those of every dashboard."""
    return [query for board in boards().values() for query in queries(board)]


def named(legend: str, labels: Mapping[str, str]) -> str:
    """What Grafana calls a series."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), legend)


def _pattern(chosen: tuple[str, ...]) -> str:
    """How Grafana writes the values of a variable into a regular expression."""
    if not chosen:
        return ".*"
    escaped = [re.sub(r"([\\^$*+?.()|\[\]{}])", r"\\\\\1", value) for value in chosen]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
