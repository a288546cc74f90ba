"""Scrape targets of a Ray cluster's nodes, for Prometheus."""

import json
import os
from pathlib import Path

from apar_core.whole_files import replace_file
from deployments.config import ConfigError

JOB = "apar"
"""Job label of our targets, which the rules select."""


def node_targets(port: int) -> list[str]:
    """`host:port` of each live node of the connected Ray cluster.

    Nodes without a gateway or replica do not answer there.
    """
    import ray  # Imported late: Ray reads its environment variables on import.

    return [f"{_host(node['NodeManagerAddress'])}:{port}" for node in ray.nodes() if node["Alive"]]


def discovery_url() -> str | None:
    """URL of Ray's list of nodes for `http_sd_configs`; None without Ray's dashboard.

    It names the ports of Ray's own metrics.
    """
    from ray._private.worker import get_dashboard_url  # Imported late, as above.

    address = get_dashboard_url()
    return f"http://{address}/api/prometheus/sd" if address else None


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def check_targets_file(file: Path | None) -> None:
    """Raise ConfigError if the file's folder is not writable."""
    if file is not None and not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"metrics.targets_file: {file.parent} is not a writable folder")


def write_targets(file: Path, targets: list[str]) -> bool:
    """Write a file for Prometheus' `file_sd_configs` atomically; return whether it changed."""
    text = json.dumps([{"labels": {"job": JOB}, "targets": targets}]) + "\n"
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    # Prometheus may run as another user.
    replace_file(file, text, mode=0o644)
    return True
