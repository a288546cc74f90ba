"""Grafana's provisioning files match the dashboards and compose.yaml."""

from pathlib import Path
from typing import Any

import yaml

from dashboards.grafana import generate
from dashboards.prometheus.settings import CLUSTER, ONE_MACHINE
from tests.fakes.grafana import View, boards

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

    assert source["jsonData"]["timeInterval"] == f"{CLUSTER.scrape_s}s"
    assert CLUSTER.scrape_s == ONE_MACHINE.scrape_s == View(0, 1).scrape_s


def test_dashboards_come_from_files_and_are_read_only() -> None:
    [provider] = read("dashboards/apar.yaml")["providers"]

    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).is_absolute()
    assert not provider["allowUiUpdates"]
