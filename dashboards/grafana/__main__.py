"""Write the JSON of the dashboards: `python -m dashboards.grafana`, or `make dashboards`."""

from dashboards.grafana.generate import write

write()
