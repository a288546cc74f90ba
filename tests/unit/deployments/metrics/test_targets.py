"""The target file for Prometheus."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.config import ConfigError
from deployments.metrics.targets import check_targets_file, node_targets, write_targets


def test_live_nodes_are_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "Alive": True},
        {"NodeManagerAddress": "fd00::2", "Alive": True},
        {"NodeManagerAddress": "10.0.0.3", "Alive": False},
    ]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))

    assert node_targets(9464) == ["10.0.0.1:9464", "[fd00::2]:9464"]


def test_an_unwritable_file_is_refused_with_its_setting(tmp_path: Path) -> None:
    check_targets_file(None)
    check_targets_file(tmp_path / "targets.json")
    with pytest.raises(
        ConfigError,
        match=r"metrics\.targets_file: .*missing is not a writable "
        r"folder",
    ):
        check_targets_file(tmp_path / "missing" / "targets.json")


def test_the_file_is_written_only_when_targets_change(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"

    assert write_targets(file, ["a:1"])
    assert not write_targets(file, ["a:1"])
    assert write_targets(file, ["a:1", "b:2"])

    assert json.loads(file.read_text()) == [{"labels": {"job": "apar"}, "targets": ["a:1", "b:2"]}]
    assert [path.name for path in tmp_path.iterdir()] == ["targets.json"]
