"""The rows of the overview."""

from dashboards.grafana.board import Board, Row
from dashboards.grafana.overview import load, now, requests, trouble


def overview() -> Board:
    """Requests, latency, load and errors of the cluster."""
    return Board(
        uid="apar-overview",
        title="APAR / Overview",
        description="Requests, latency, load and errors of the cluster.",
        rows=(
            Row("Now", now.panels()),
            Row("Requests", requests.panels()),
            Row("Load", load.panels()),
            Row("What goes wrong", trouble.panels()),
            Row("Replicas", [load.replica_table()]),
        ),
    )
