"""The files of this folder, as YAML."""

from pathlib import Path
from typing import Any

import yaml

from dashboards.prometheus.notifying import NotifySettings, alertmanager_config
from dashboards.prometheus.rules_file import alerts_file, recording_file
from dashboards.prometheus.scraping import CLUSTER, ONE_MACHINE, ScrapeSettings, prometheus_config
from dashboards.prometheus.settings import RuleSettings

FOLDER = Path(__file__).parent
_HEADER = (
    "# Made by `python -m dashboards.prometheus`, which takes other addresses and thresholds.\n"
)
_CLUSTER = """\
# For a Ray cluster: finds its nodes by the list that Ray keeps on its head, as a file (Prometheus
# on the head, or /tmp/ray mounted) and over HTTP (put the head's name for 127.0.0.1). A list that
# cannot be read does no harm. A node in both has the same address, and is read once.
"""
_ONE_MACHINE = """\
# For `apar serve` with a Ray of its own, which has one address; or name the file that
# `metrics.targets_file` keeps, under `file_sd_configs`.
"""


class _Dumper(yaml.SafeDumper):
    """Queries of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(content: dict[str, Any], about: str = "") -> str:
    """A file's text, with comments `about` it at its head."""
    return _HEADER + about + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)


def rule_files(rules: RuleSettings) -> dict[str, str]:
    """Paths below the folder, and texts, of the rule files."""
    return {
        "rules/recording.yml": as_yaml(recording_file(rules)),
        "rules/alerts.yml": as_yaml(alerts_file(rules)),
    }


def shipped_files() -> dict[str, str]:
    """Paths below this folder, and texts, of everything that is made."""
    return {
        **rule_files(RuleSettings()),
        "prometheus.yml": as_yaml(prometheus_config(CLUSTER), _CLUSTER),
        "prometheus-single-machine.yml": as_yaml(prometheus_config(ONE_MACHINE), _ONE_MACHINE),
        "alertmanager.yml": as_yaml(alertmanager_config(NotifySettings())),
    }


def own_files(
    scraping: ScrapeSettings, rules: RuleSettings, notifying: NotifySettings
) -> dict[str, str]:
    """The same for other addresses and thresholds."""
    return {
        **rule_files(rules),
        "prometheus.yml": as_yaml(prometheus_config(scraping)),
        "alertmanager.yml": as_yaml(alertmanager_config(notifying)),
    }


def write(files: dict[str, str], folder: Path) -> None:
    """Write them below a folder."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
