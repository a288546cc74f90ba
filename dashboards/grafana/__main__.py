"""Writes the dashboards' JSON: `python -m dashboards.grafana`, or `make dashboards`."""

from dashboards.grafana.generate import write

write()
