"""Prometheus' own configuration: which nodes it reads, and how it finds them."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from cluster.config.metrics import DEFAULT_PORT
from dashboards.prometheus.settings import JOB

RAY_FILE = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where the head of a Ray cluster keeps the addresses of all nodes, renewed every 5 s."""
RAY_DASHBOARD = "http://127.0.0.1:8265/api/prometheus/sd"
"""The same list over HTTP, from the head's dashboard."""
SINGLE_MACHINE = f"127.0.0.1:{DEFAULT_PORT}"
"""Where a private cluster of `apar serve` tells its metrics."""


class ScrapeSettings(BaseModel):
    """Where the nodes' metrics are, how often they are read, and who is told of alerts.

    Name each node in one way only, or with the same address in all: a node under two addresses
    counts twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    discovery_files: tuple[str, ...] = Field(
        (), description="Files of targets in Prometheus' form (file_sd), such as Ray's."
    )
    discovery_urls: tuple[str, ...] = Field(
        (), description="Addresses that return such lists (http_sd), such as Ray's dashboard."
    )
    targets: tuple[str, ...] = Field((), description="Addresses `host:port` of nodes.")
    alertmanagers: tuple[str, ...] = Field(
        ("127.0.0.1:9093",), description="Addresses `host:port` of Alertmanagers."
    )
    rule_files: tuple[str, ...] = Field(
        ("rules/*.yml",), description="Rule files, relative to the configuration."
    )
    scrape_s: PositiveInt = Field(
        15,
        description="Seconds between two reads of a node; at most a quarter of a minute, which "
        "is the shortest window of the rules.",
        le=15,
    )
    evaluation_s: PositiveInt = Field(
        15, description="Seconds between two evaluations of the rules."
    )

    @model_validator(mode="after")
    def _check_targets(self) -> "ScrapeSettings":
        if not (self.discovery_files or self.discovery_urls or self.targets):
            raise ValueError("name a discovery file, a discovery URL or a target")
        return self


def prometheus_config(settings: ScrapeSettings) -> dict[str, Any]:
    """`prometheus.yml`."""
    discovery: dict[str, Any] = {}
    if settings.discovery_files:
        discovery["file_sd_configs"] = [
            {"files": list(settings.discovery_files), "refresh_interval": "30s"}
        ]
    if settings.discovery_urls:
        discovery["http_sd_configs"] = [
            {"url": url, "refresh_interval": "30s"} for url in settings.discovery_urls
        ]
    if settings.targets:
        discovery["static_configs"] = [{"targets": list(settings.targets)}]
    return {
        "global": {
            "scrape_interval": f"{settings.scrape_s}s",
            "evaluation_interval": f"{settings.evaluation_s}s",
        },
        "rule_files": list(settings.rule_files),
        "alerting": {
            "alertmanagers": [{"static_configs": [{"targets": list(settings.alertmanagers)}]}]
        },
        "scrape_configs": [
            {
                "job_name": JOB,
                **discovery,
                # Ray's lists say job="ray".
                "relabel_configs": [{"target_label": "job", "replacement": JOB}],
            }
        ],
    }


CLUSTER = ScrapeSettings(discovery_files=(RAY_FILE,), discovery_urls=(RAY_DASHBOARD,))
"""A Ray cluster, with Prometheus on its head: both lists give the same addresses."""
ONE_MACHINE = ScrapeSettings(targets=(SINGLE_MACHINE,))
"""`apar serve` without a Ray cluster."""
