"""Metrics of the cluster, declared once for exporters, dashboards, alerts and tests."""
