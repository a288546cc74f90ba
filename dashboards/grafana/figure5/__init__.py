"""The paper's Figure 5 of what is served now: throughput over KV use, latency over concurrency."""

from dashboards.grafana.figure5.dashboard import figure5

__all__ = ["figure5"]
