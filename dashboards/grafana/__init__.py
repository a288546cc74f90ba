"""Grafana dashboards as code: `dashboards()` returns their JSON, `make dashboards` writes it."""

from dashboards.grafana.generate import dashboards

__all__ = ["dashboards"]
