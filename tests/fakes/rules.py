"""The shipped rules and configuration of Prometheus, as tests read and change them."""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "dashboards" / "prometheus"
CLUSTER = ("cluster", "namespace")
"""Labels of targets that tell one cluster from another; every rule keeps them."""


def shipped(name: str) -> Any:
    """Return the content of a file of the folder."""
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def rule_groups() -> list[dict[str, Any]]:
    """Return the groups of all rule files."""
    return [
        group
        for file in sorted((FOLDER / "rules").glob("*.yml"))
        for group in shipped(f"rules/{file.name}")["groups"]
    ]


RULES: list[dict[str, Any]] = [rule for group in rule_groups() for rule in group["rules"]]
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def write_yaml(file: Path, content: Any) -> None:
    """Write a file that Prometheus or Alertmanager reads."""
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def configured(name: str, *, interval_s: int = 1, **discovery: Any) -> dict[str, Any]:
    """Return a shipped configuration with other targets and intervals, and the shipped rules.

    `discovery` replaces the ways in which targets are found, such as `static_configs`.
    """
    config: dict[str, Any] = shipped(name)
    config["global"] = {key: f"{interval_s}s" for key in config["global"]}
    config["rule_files"] = [str(FOLDER / each) for each in config["rule_files"]]
    [job] = config["scrape_configs"]
    for key in [key for key in job if key.endswith("_sd_configs") or key == "static_configs"]:
        del job[key]
    job.update(discovery)
    return config
