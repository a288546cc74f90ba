"""Frame of every dashboard: variables, links to the others, refresh interval, annotations."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as frame
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from dashboards.grafana.panels import SOURCE
from dashboards.grafana.promql import IN_CLUSTERS, events
from deployments.metrics import catalogue

TAG = "apar"
REFRESH = "30s"
OUR_ALERTS = f'alertname=~"Apar.+",{IN_CLUSTERS}'
"""Matches only the alerts of dashboards/prometheus in the selected clusters."""


class Panel(Builder[dashboard.Panel]):
    """Panel with an id, which Grafana's links to a single panel need."""

    def __init__(self, panel: Builder[dashboard.Panel], number: int) -> None:
        self._panel = panel
        self._number = number

    def build(self) -> dashboard.Panel:
        """Build the panel and set its id."""
        built = self._panel.build()
        built.id_val = self._number
        return built


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; `repeat` names a variable to repeat the row for."""

    title: str
    panels: Sequence[Builder[dashboard.Panel]]
    repeat: str | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard; `uid` is part of its URL, `since` the start of its default time range."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    since: str = "now-1h"

    def build(self) -> dashboard.Dashboard:
        """Build the dashboard and number its panels in order."""
        built = (
            frame.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([TAG])
            .time(self.since, "now")
            .refresh(REFRESH)
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(_link())
            .annotations(_annotations())
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
    """Build the variables: data source, cluster, namespace, model, replica.

    Only replicas alive at the end of the range are listed. Otherwise every restart, which gives a
    replica a new id, would make the list longer.
    """
    alive = f'count by (replica) ({catalogue.KV_BLOCKS.name}{{{IN_CLUSTERS},model=~"$model"}})'
    known = catalogue.REPLICAS_WANTED.name
    of_cluster = IN_CLUSTERS.partition(",")[0]
    return [
        frame.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _chosen("cluster", "Cluster").query(f"label_values({known}, cluster)").all_value(".*"),
        _chosen("namespace", "Namespace")
        .query(f"label_values({known}{{{of_cluster}}}, namespace)")
        .all_value(".*"),
        _chosen("model", "Model")
        .query(f"label_values({known}{{{IN_CLUSTERS}}}, model)")
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


def _link() -> frame.DashboardLink:
    return (
        frame.DashboardLink("APAR")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .icon("external link")
        .tooltip("Other dashboards, with the same time range and models")
        .url("")
        .tags([TAG])
        .as_dropdown(False)
        .target_blank(False)
        .include_vars(True)
        .keep_time(True)
    )


def _annotations() -> list[Builder[dashboard.AnnotationQuery]]:
    """Build the annotations on every plot: firing alerts and replica restarts."""
    firing = f'ALERTS{{alertstate="firing",{OUR_ALERTS}}}'
    return [
        _annotation("Alerts", "red", f"sum by (alertname) ({firing})"),
        _annotation(
            "Replica restarts", "orange", f"{events(catalogue.REPLICA_RESTARTS, 'model')} > 0"
        ),
    ]


def _annotation(name: str, colour: str, expression: str) -> frame.AnnotationQuery:
    return (
        frame.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expression)
    )
