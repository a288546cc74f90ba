"""What all dashboards share: variables, links to each other, refresh, marks of events."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as frame
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from cluster.metrics import catalogue
from dashboards.grafana.panels import SOURCE
from dashboards.grafana.promql import events

TAG = "apar"
REFRESH = "30s"
ALERT_NAMES = 'alertname=~"Apar.+"'
"""Matches the alerts of dashboards/prometheus, and no others of the same Prometheus."""


class Panel(Builder[dashboard.Panel]):
    """A panel that gets its number; the kinds of panels have no other type in common."""

    def __init__(self, panel: Builder[dashboard.Panel], number: int) -> None:
        self._panel = panel
        self._number = number

    def build(self) -> dashboard.Panel:
        """The panel; Grafana's links to a single panel need its number."""
        built = self._panel.build()
        built.id_val = self._number
        return built


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; repeated for each value of a variable, if one is given."""

    title: str
    panels: Sequence[Builder[dashboard.Panel]]
    repeat: str | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard; `uid` is its address, `since` the start of the range that it opens with."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    since: str = "now-1h"

    def build(self) -> dashboard.Dashboard:
        """The dashboard, with panels numbered in their order."""
        built = (
            frame.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([TAG])
            .time(self.since, "now")
            .refresh(REFRESH)
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(_other_dashboards())
            .annotations(_events())
            .variables(_variables())
        )
        number = 0
        for row in self.rows:
            number += 1
            heading = frame.Row(row.title).id(number)
            built = built.with_row(heading.repeat(row.repeat) if row.repeat else heading)
            for panel in row.panels:
                number += 1
                built = built.with_panel(Panel(panel, number))
        return built.build()


def _variables() -> list[Builder[dashboard.VariableModel]]:
    """Which Prometheus, model and replicas.

    Only replicas that live at the end of the range are offered, so that a replica that comes back
    under new ids does not make the list grow.
    """
    alive = f'count by (replica) ({catalogue.KV_BLOCKS.exported}{{model=~"$model"}})'
    return [
        frame.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _chosen("model", "Model")
        .query(f"label_values({catalogue.REPLICAS.exported}, model)")
        .all_value(".*"),
        _chosen("replica", "Replica (engine panels)")
        .query(f"query_result({alive})")
        .regex('/replica="([^"]+)"/')
        .all_value(".*"),
    ]


def _chosen(name: str, label: str) -> frame.QueryVariable:
    return (
        frame.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _other_dashboards() -> frame.DashboardLink:
    return (
        frame.DashboardLink("APAR")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .icon("external link")
        .tooltip("The other dashboards, for the same time and models")
        .url("")
        .tags([TAG])
        .as_dropdown(False)
        .target_blank(False)
        .include_vars(True)
        .keep_time(True)
    )


def _events() -> list[Builder[dashboard.AnnotationQuery]]:
    """Marks on every plot: alerts that fire, replicas that were started in place of lost ones."""
    firing = f'ALERTS{{alertstate="firing",{ALERT_NAMES}}}'
    return [
        _event("Alerts", "red", f"sum by (alertname) ({firing})"),
        _event("Replica restarts", "orange", f"{events(catalogue.REPLICA_RESTARTS, 'model')} > 0"),
    ]


def _event(name: str, colour: str, expression: str) -> frame.AnnotationQuery:
    return (
        frame.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expression)
    )
