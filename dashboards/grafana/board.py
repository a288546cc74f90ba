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


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Builder[dashboard.Panel]]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard; `uid` is part of its URL."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]

    def build(self) -> dashboard.Dashboard:
        """Build the dashboard and number its panels in order."""
        builder = (
            frame.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([TAG])
            .time("now-1h", "now")
            .refresh(REFRESH)
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(_link())
            .annotations(_annotations())
            .variables(_variables())
        )
        for row in self.rows:
            builder = builder.with_row(frame.Row(row.title))
            for panel in row.panels:
                builder = builder.with_panel(panel)
        built = builder.build()
        # Grafana's links to a single panel need ids.
        for number, each in enumerate(built.panels or (), start=1):
            each.id_val = number
        return built


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
