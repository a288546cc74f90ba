"""For the operator: is it up, is it fast, is it full, what goes wrong."""

from dashboards.grafana.overview.dashboard import overview

__all__ = ["overview"]
