"""Settings of Prometheus and Alertmanager, and the configuration files made from them."""

from pathlib import Path
from typing import Any, Self

import typer
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from dashboards.prometheus.rule import CLUSTER as CLUSTER_LABELS
from dashboards.prometheus.rule import JOB, Severity
from deployments.config.metrics import DEFAULT_PORT
from deployments.metrics import catalogue


class RuleSettings(BaseModel):
    """Thresholds of the alerts; the defaults suit interactive use of a 7B model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    availability: float = Field(
        0.999, gt=0, lt=1, description="Objective: share of requests without a server error."
    )
    first_token_s: PositiveFloat = Field(
        2.5,
        description="Objective: longest acceptable time to first token, in seconds; must be a "
        "bucket bound.",
    )
    output_token_s: PositiveFloat = Field(
        0.1,
        description="Objective: longest acceptable time per token of the critical path, in "
        "seconds; must be a bucket bound.",
    )
    latency_share: float = Field(
        0.95, gt=0, lt=1, description="Objective: share of requests within these two times."
    )
    least_requests: PositiveInt = Field(
        20,
        description="Minimum requests of a model per hour for objectives to be evaluated, so that "
        "one error at night does not page anyone.",
    )
    queue_time_s: PositiveFloat = Field(
        5.0, description="Threshold of the 90th percentile of queue time, in seconds."
    )
    queue_growth_requests: PositiveInt = Field(
        10, description="Growth of a queue within 10 minutes, in requests."
    )
    rejected_requests: PositiveInt = Field(
        10, description="Requests rejected for lack of capacity within 10 minutes."
    )
    authentication_failures: PositiveInt = Field(
        100, description="Requests with an invalid API key within 10 minutes."
    )
    kv_cache_usage: float = Field(
        0.95, gt=0, lt=1, description="Share of a replica's KV blocks in use."
    )
    preemptions_per_s: PositiveFloat = Field(
        0.1, description="Preempted threads per second and replica."
    )
    refused_forks: float = Field(0.1, gt=0, lt=1, description="Share of forks refused.")
    deferred_threads: float = Field(
        0.25, gt=0, description="Forks held back by a cap, per running thread."
    )
    replica_restarts: PositiveInt = Field(
        3, description="Replicas of a model lost within 30 minutes that are tolerated."
    )
    hold_scale: PositiveFloat = Field(
        1.0,
        description="Factor on the `for` duration of every alert; tests set it below 1 to avoid "
        "waiting for minutes.",
    )
    runbook: str = Field(
        "https://github.com/apar-serve/apar-serve/blob/main/dashboards/RUNBOOK.md",
        pattern="^https?://",
        description="URL of the runbook; `runbook_url` of an alert is this URL with the alert's "
        "section as anchor. Set it to your copy: the default need not be reachable for you.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for bound, metric in (
            (self.first_token_s, catalogue.TIME_TO_FIRST_TOKEN),
            (self.output_token_s, catalogue.TIME_PER_CRITICAL_PATH_TOKEN),
        ):
            if bound not in metric.buckets:
                raise ValueError(
                    f"{bound} is not a bucket bound of {metric.name}: {metric.buckets}"
                )
        return self


RAY_FILE = "/tmp/ray/prom_metrics_service_discovery.json"
"""File with the addresses of all nodes, which the head of a Ray cluster renews every 5 s."""
RAY_DASHBOARD = "http://127.0.0.1:8265/api/prometheus/sd"
"""The same list over HTTP, from the dashboard on the head."""
SINGLE_MACHINE = f"127.0.0.1:{DEFAULT_PORT}"
"""Metrics address of the private cluster that `apar serve` starts."""


class ScrapeSettings(BaseModel):
    """Scrape targets, intervals, rule files and Alertmanagers.

    List each node once, or with the same address in every list. A node under two addresses counts
    twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    discovery_files: tuple[str, ...] = Field(
        (), description="Target files in Prometheus' file_sd format, such as Ray's."
    )
    discovery_urls: tuple[str, ...] = Field(
        (), description="URLs that return targets (http_sd), such as Ray's dashboard."
    )
    targets: tuple[str, ...] = Field((), description="Addresses `host:port` of nodes.")
    alertmanagers: tuple[str, ...] = Field(
        ("127.0.0.1:9093",), description="Addresses `host:port` of Alertmanagers."
    )
    rule_files: tuple[str, ...] = Field(
        ("rules/*.yml",), description="Rule files, relative to the configuration file."
    )
    cluster: str = Field(
        "default", min_length=1, description="Label `cluster` of all targets: which cluster it is."
    )
    namespace: str = Field(
        "default",
        min_length=1,
        description="Label `namespace` of all targets, on Kubernetes that of the pods.",
    )
    port: PositiveInt | None = Field(
        None,
        le=65535,
        description="Port of the metrics on all listed nodes, in place of the listed one: Ray's "
        "lists name Ray's own.",
    )
    scrape_s: PositiveInt = Field(
        15,
        description="Scrape interval in seconds; at most 15, a quarter of the shortest window of "
        "the rules.",
        le=15,
    )
    evaluation_s: PositiveInt = Field(15, description="Rule evaluation interval in seconds.")

    @model_validator(mode="after")
    def _check_targets(self) -> "ScrapeSettings":
        if not (self.discovery_files or self.discovery_urls or self.targets):
            raise ValueError("set a discovery file, a discovery URL or a target")
        return self


def prometheus_config(settings: ScrapeSettings) -> dict[str, Any]:
    """Return the content of `prometheus.yml`."""
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
                "relabel_configs": _relabeling(settings),
            }
        ],
    }


def _relabeling(settings: ScrapeSettings) -> list[dict[str, Any]]:
    # Ray's lists set job="ray".
    labels = {"job": JOB, "cluster": settings.cluster, "namespace": settings.namespace}
    rules: list[dict[str, Any]] = [
        {"target_label": label, "replacement": value} for label, value in labels.items()
    ]
    if settings.port is not None:
        address = {"source_labels": ["__address__"], "target_label": "__address__"}
        port = {"regex": r"(.*):\d+", "replacement": f"$1:{settings.port}"}
        rules.append(address | port)
    return rules


CLUSTER = ScrapeSettings(
    discovery_files=(RAY_FILE,), discovery_urls=(RAY_DASHBOARD,), port=DEFAULT_PORT
)
"""A Ray cluster with Prometheus on its head; both lists contain the same addresses."""
ONE_MACHINE = ScrapeSettings(targets=(SINGLE_MACHINE,))
"""`apar serve` without a Ray cluster."""


class NotifySettings(BaseModel):
    """Webhooks that receive alerts, and the timing of notifications."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_url: str = Field(
        "http://127.0.0.1:9099/page", description="Webhook for alerts with severity `page`."
    )
    ticket_url: str = Field(
        "http://127.0.0.1:9099/ticket", description="Webhook for all other alerts."
    )
    group_wait_s: PositiveInt = Field(
        30,
        description="Seconds to collect further alerts of a group before the first notification.",
    )
    group_interval_s: PositiveInt = Field(
        300, description="Seconds between notifications of one group of alerts."
    )


def alertmanager_config(settings: NotifySettings) -> dict[str, Any]:
    """Return the content of `alertmanager.yml`."""
    return {
        "route": {
            "receiver": "ticket",
            "group_by": ["alertname", *CLUSTER_LABELS, "model"],
            "group_wait": f"{settings.group_wait_s}s",
            "group_interval": f"{settings.group_interval_s}s",
            "repeat_interval": "12h",
            "routes": [
                {
                    "matchers": [f'severity="{Severity.PAGE}"'],
                    "receiver": "page",
                    "repeat_interval": "1h",
                }
            ],
        },
        "inhibit_rules": _inhibitions(),
        "receivers": [
            {"name": name, "webhook_configs": [{"url": url, "send_resolved": True}]}
            for name, url in (("page", settings.page_url), ("ticket", settings.ticket_url))
        ],
    }


def _inhibitions() -> list[dict[str, Any]]:
    """Suppress alerts that another firing alert already implies."""
    return [
        {
            "source_matchers": ['alertname="AparNoReplica"'],
            "target_matchers": [
                'alertname=~"AparReplicaMissing|AparNothingGenerated|AparQueue.*|Apar.*BudgetBurn.*"'
            ],
            "equal": [*CLUSTER_LABELS, "model"],
        },
        {
            "source_matchers": [f'severity="{Severity.PAGE}"', 'objective=~".+"'],
            "target_matchers": [f'severity="{Severity.TICKET}"', 'objective=~".+"'],
            "equal": [*CLUSTER_LABELS, "model", "objective"],
        },
    ]


class Settings(BaseModel):
    """Content of a settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scraping: ScrapeSettings = Field(
        CLUSTER, description="Scrape targets, rule files and Alertmanagers."
    )
    rules: RuleSettings = Field(RuleSettings(), description="Thresholds of the alerts.")
    notifying: NotifySettings = Field(NotifySettings(), description="Receivers of alerts.")


def read_settings(file: Path) -> Settings:
    """Read a settings file; raise typer's BadParameter, which names file and field."""
    try:
        return Settings.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise typer.BadParameter(f"{file}: {error}") from error
