"""For the engineer: how models fork, what it saves, what happens to the KV cache."""

from dashboards.grafana.forks.dashboard import forks

__all__ = ["forks"]
