"""Configuration of Prometheus and Alertmanager, recording rules and alert rules."""

from dashboards.prometheus.files import rule_groups
from dashboards.prometheus.settings import RuleSettings

__all__ = ["RuleSettings", "rule_groups"]
