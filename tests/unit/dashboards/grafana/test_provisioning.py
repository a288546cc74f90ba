"""Grafana's provisioning files match the dashboards and compose.yaml."""

from pathlib import Path
from typing import Any

import yaml

from dashboards.grafana import generate
from tests.fakes.grafana import View, boards
from tests.fakes.rules import shipped

FOLDER = Path(generate.__file__).with_name("provisioning")


def read(path: str) -> Any:
    content = yaml.safe_load((FOLDER / path).read_text())
    assert content["apiVersion"] == 1
    return content


def test_the_data_source_has_the_type_that_dashboards_use() -> None:
    [source] = read("datasources/prometheus.yaml")["datasources"]
    types = {
        each["query"]
        for board in boards().values()
        for each in board["templating"]["list"]
        if each["type"] == "datasource"
    }

    assert {source["type"]} == types
    assert source["isDefault"]


def test_the_data_source_has_the_scrape_interval() -> None:
    [source] = read("datasources/prometheus.yaml")["datasources"]

    interval = source["jsonData"]["timeInterval"]
    for name in ("prometheus.yml", "prometheus-single-machine.yml"):
        assert shipped(name)["global"]["scrape_interval"] == interval
    assert interval == f"{View(0, 1).scrape_s:g}s"


def test_dashboards_come_from_files_and_are_read_only() -> None:
    [provider] = read("dashboards/apar.yaml")["providers"]

    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).is_absolute()
    assert not provider["allowUiUpdates"]
