"""Rules and dashboards as the objects that prometheus-operator and Grafana read."""

from pathlib import Path
from typing import Any

import yaml

from dashboards.grafana import dashboards
from dashboards.prometheus import rule_groups

FOLDER = Path(__file__).parent / "components" / "monitoring" / "made"
_HEADER = "# Made by `make k8s` of dashboards/; do not edit.\n"
_LABELS = {"app.kubernetes.io/part-of": "apar-serve"}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no references between equal parts."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def prometheus_rule() -> dict[str, Any]:
    """All recording and alert rules."""
    labels = _LABELS | {
        # By these kube-prometheus and kube-prometheus-stack find it, as they are shipped.
        "prometheus": "k8s",
        "role": "alert-rules",
        "release": "kube-prometheus-stack",
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "apar", "labels": labels},
        "spec": {"groups": rule_groups()},
    }


def dashboard_config_maps() -> list[dict[str, Any]]:
    """One ConfigMap a dashboard, each far below what one may hold."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"dashboard-{uid}",
                # Grafana's sidecar looks for this label.
                "labels": _LABELS | {"grafana_dashboard": "1"},
                "annotations": {"grafana_folder": "APAR"},
            },
            "data": {f"{uid}.json": text},
        }
        for uid, text in dashboards().items()
    ]


def made_files() -> dict[str, str]:
    """Name and text of each file in `made/`."""
    return {
        "prometheus-rule.yaml": _as_yaml([prometheus_rule()]),
        "dashboards.yaml": _as_yaml(dashboard_config_maps()),
    }


def write(folder: Path = FOLDER) -> None:
    """Write them."""
    folder.mkdir(exist_ok=True)
    for name, text in made_files().items():
        (folder / name).write_text(text, encoding="utf-8")


def _as_yaml(objects: list[dict[str, Any]]) -> str:
    return _HEADER + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100)
