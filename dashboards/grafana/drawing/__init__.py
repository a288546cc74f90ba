"""Panels drawn with matplotlib from their JSON, to look at them where there is no Grafana."""
