"""What the cluster tells of itself, declared once for exporters, dashboards, alerts and tests."""
