"""Prometheus' and Alertmanager's configuration, recording rules and alert rules."""

from dashboards.prometheus.rules_file import rule_groups
from dashboards.prometheus.settings import RuleSettings

__all__ = ["RuleSettings", "rule_groups"]
