"""Every setting of rules, scraping and notifications changes the files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from dashboards.prometheus import RuleSettings, rule_groups
from dashboards.prometheus.settings import (
    CLUSTER,
    ONE_MACHINE,
    NotifySettings,
    ScrapeSettings,
    alertmanager_config,
    prometheus_config,
)

TARGET = "127.0.0.1:9999"
CHANGES: dict[str, tuple[Any, dict[str, str]]] = {
    # Field: another value, and the text that it puts into the named rule.
    "availability": (0.99, {"AparErrorBudgetBurnFast": "ratio_rate1h > 0.144"}),
    "first_token_s": (5.0, {"model:apar_slow_first_tokens:ratio_rate5m": 'le="5.0"'}),
    "output_token_s": (0.05, {"model:apar_slow_output_tokens:ratio_rate5m": 'le="0.05"'}),
    "latency_share": (0.9, {"AparFirstTokenBudgetBurnSlow": "ratio_rate3d > 0.1"}),
    "least_requests": (7, {"AparErrorBudgetBurnSlow": ">= 7"}),
    "queue_time_s": (2.0, {"AparQueueTimeHigh": "> 2"}),
    "queue_growth_requests": (33, {"AparQueueGrowing": "> 33"}),
    "rejected_requests": (44, {"AparRequestsRejected": "> 44"}),
    "authentication_failures": (55, {"AparAuthenticationFailures": "> 55"}),
    "kv_cache_usage": (0.8, {"AparKvCacheNearlyFull": "> 0.8"}),
    "preemptions_per_s": (3.0, {"AparPreemptions": "> 3"}),
    "refused_forks": (0.3, {"AparForksRefused": "> 0.3"}),
    "deferred_threads": (2.0, {"AparForksDelayed": "> 2"}),
    "replica_restarts": (9, {"AparReplicaRestarts": "> 9"}),
}


def rules(settings: RuleSettings) -> dict[str, dict[str, Any]]:
    """All rules by name."""
    every = [rule for group in rule_groups(settings) for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule for rule in every}


@pytest.mark.parametrize("field", CHANGES)
def test_a_threshold_appears_in_its_rule(field: str) -> None:
    value, expected = CHANGES[field]
    before, after = rules(RuleSettings()), rules(RuleSettings(**{field: value}))

    for name, text in expected.items():
        assert text in after[name]["expr"]
        assert text not in before[name]["expr"]


def test_hold_scale_shortens_every_hold() -> None:
    before, after = rules(RuleSettings()), rules(RuleSettings(hold_scale=0.01))

    holds = {rule["for"] for rule in before.values() if "alert" in rule}
    short = {rule["for"] for rule in after.values() if "alert" in rule}
    assert holds == {"0s", "1m", "2m", "3m", "5m", "10m", "15m", "1h"}
    assert short == {"0s", "600ms", "1200ms", "1800ms", "3s", "6s", "9s", "36s"}


def test_alerts_link_to_the_runbook() -> None:
    made = rules(RuleSettings(runbook="https://wiki/apar"))

    assert made["AparNoReplica"]["annotations"]["runbook_url"] == "https://wiki/apar#aparnoreplica"


def test_every_field_of_the_rules_is_tested() -> None:
    assert RuleSettings.model_fields.keys() == CHANGES.keys() | {"hold_scale", "runbook"}


@pytest.mark.parametrize("model", [RuleSettings, ScrapeSettings, NotifySettings])
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize(
    "values",
    [
        {"first_token_s": 3.0},
        {"output_token_s": 0.06},
        {"availability": 1.0},
        {"nothing": 1},
        {"runbook": "RUNBOOK.md"},
    ],
)
def test_invalid_rule_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RuleSettings(**values)


def test_a_cluster_is_discovered_by_rays_file_and_rays_dashboard() -> None:
    (job,) = prometheus_config(CLUSTER)["scrape_configs"]

    assert job["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
    assert job["http_sd_configs"][0]["url"] == "http://127.0.0.1:8265/api/prometheus/sd"
    assert "static_configs" not in job


def test_a_single_machine_has_one_address() -> None:
    (job,) = prometheus_config(ONE_MACHINE)["scrape_configs"]

    assert job["static_configs"] == [{"targets": ["127.0.0.1:9464"]}]
    assert job.keys().isdisjoint({"file_sd_configs", "http_sd_configs"})


def test_other_addresses_and_intervals_appear_in_the_configuration() -> None:
    made = prometheus_config(
        ScrapeSettings(
            discovery_files=("a.json",),
            discovery_urls=("http://head/sd",),
            targets=(TARGET,),
            alertmanagers=("alerts:1",),
            rule_files=("mine.yml",),
            scrape_s=2,
            evaluation_s=3,
        )
    )

    (job,) = made["scrape_configs"]
    assert made["global"] == {"scrape_interval": "2s", "evaluation_interval": "3s"}
    assert made["rule_files"] == ["mine.yml"]
    assert made["alerting"]["alertmanagers"][0]["static_configs"] == [{"targets": ["alerts:1"]}]
    assert job["file_sd_configs"][0]["files"] == ["a.json"]
    assert job["http_sd_configs"][0]["url"] == "http://head/sd"
    assert job["static_configs"][0]["targets"] == [TARGET]


@pytest.mark.parametrize("values", [{}, {"targets": (TARGET,), "scrape_s": 30}])
def test_missing_targets_and_long_scrape_intervals_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScrapeSettings(**values)


def test_receivers_and_delays_appear_in_alertmanagers_configuration() -> None:
    settings = NotifySettings(
        page_url="http://p", ticket_url="http://t", group_wait_s=1, group_interval_s=2
    )
    made = alertmanager_config(settings)

    urls = {each["name"]: each["webhook_configs"][0]["url"] for each in made["receivers"]}
    assert urls == {"page": "http://p", "ticket": "http://t"}
    assert made["route"]["group_wait"] == "1s"
    assert made["route"]["group_interval"] == "2s"


def test_the_command_writes_files_for_other_settings(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yml"
    own = {"scraping": {"targets": [TARGET]}, "rules": {"replica_restarts": 9}}
    settings.write_text(yaml.safe_dump(own))
    command = [
        sys.executable,
        "-m",
        "dashboards.prometheus",
        "--settings",
        str(settings),
        "--out",
        str(tmp_path),
    ]

    subprocess.run(command, check=True, timeout=300)

    assert TARGET in (tmp_path / "prometheus.yml").read_text()
    assert "increase30m > 9" in (tmp_path / "rules" / "alerts.yml").read_text()
    assert (tmp_path / "rules" / "recording.yml").exists()
    assert (tmp_path / "alertmanager.yml").exists()


def test_the_command_names_an_invalid_setting(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yml"
    settings.write_text("rules: {replica_restart: 9}")
    command = [
        sys.executable,
        "-m",
        "dashboards.prometheus",
        "--settings",
        str(settings),
        "--out",
        str(tmp_path),
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode != 0
    assert "replica_restart" in done.stderr
