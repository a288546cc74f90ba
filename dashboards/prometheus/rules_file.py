"""All rules, in the groups in which Prometheus evaluates them."""

from typing import Any

from dashboards.prometheus import alerts, objectives, recording
from dashboards.prometheus.rule import AlertRule, RecordingRule
from dashboards.prometheus.settings import RuleSettings


def recording_groups(settings: RuleSettings) -> dict[str, list[RecordingRule]]:
    """Recording rules by the name of their group."""
    return {
        "apar-throughput": recording.throughput(),
        "apar-savings": recording.savings(),
        "apar-kv-cache": recording.kv_cache(),
        "apar-forks": recording.forks(),
        "apar-requests": recording.requests(),
        "apar-faults": recording.faults(),
        "apar-objectives": objectives.recording_rules(settings),
    }


def alert_groups(settings: RuleSettings) -> dict[str, list[AlertRule]]:
    """Alert rules by the name of their group."""
    return {
        "apar-replica-alerts": alerts.replicas(settings),
        "apar-serving-alerts": alerts.serving(settings) + alerts.refusals(settings),
        "apar-engine-alerts": alerts.engine(settings),
        "apar-objective-alerts": objectives.alert_rules(settings),
        "apar-monitoring-alerts": alerts.processes() + alerts.monitoring(),
    }


def recording_file(settings: RuleSettings) -> dict[str, Any]:
    """`rules/recording.yml`."""
    groups = recording_groups(settings)
    return {
        "groups": [
            {"name": name, "rules": [rule.as_dict() for rule in rules]}
            for name, rules in groups.items()
        ]
    }


def alerts_file(settings: RuleSettings) -> dict[str, Any]:
    """`rules/alerts.yml`."""
    return {
        "groups": [
            {
                "name": name,
                "rules": [rule.as_dict(settings.runbook, settings.hold_scale) for rule in rules],
            }
            for name, rules in alert_groups(settings).items()
        ]
    }


def rule_groups(settings: RuleSettings | None = None) -> list[dict[str, Any]]:
    """Every group as in a rule file, which is also the `spec.groups` of a PrometheusRule."""
    settings = settings or RuleSettings()
    return [*recording_file(settings)["groups"], *alerts_file(settings)["groups"]]
