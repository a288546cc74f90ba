"""Validation of `tracing`; secrets are not shown."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.config import ClusterConfig, ConfigError, load_config
from deployments.config.files import SecretError
from deployments.config.secret import SecretReference
from deployments.config.tracing import TracingConfig

SECRET = "Bearer very-secret"
HERE = "http://127.0.0.1:4318"


def test_nothing_is_traced_unless_an_endpoint_is_given() -> None:
    assert not ClusterConfig().tracing.enabled
    assert TracingConfig(endpoint=HERE).enabled


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4318", "ftp://host", "http://", "http://me:password@host", "http://host/?token=1"],
)
def test_endpoint_is_a_url_without_secrets(endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"tracing": {"endpoint": endpoint}}))

    with pytest.raises(ConfigError, match=r"tracing\.endpoint") as raised:
        load_config(file, {}, {})

    assert "password" not in str(raised.value)


@pytest.mark.parametrize("name", ["a b", ""])
def test_header_names_must_be_valid(name: str) -> None:
    with pytest.raises(ValidationError, match="header"):
        TracingConfig(endpoint=HERE, headers={name: SecretReference(env="X")})


@pytest.mark.parametrize("value", ["x\ny", "ä", ""])
def test_header_values_must_be_valid(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", value)

    with pytest.raises(SecretError, match=r"tracing\.headers\.a: ") as raised:
        TracingConfig(endpoint=HERE, headers={"a": SecretReference(env="X")}).read_headers()

    assert not value or value not in str(raised.value)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": 123456789},
        {"authorization": "123456789\n"},
        {"authorization": {"env": "Bearer 123456789"}},
        {"authorization": {"value": "123456789"}},
    ],
)
def test_a_wrong_header_is_not_shown(headers: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"tracing": {"endpoint": HERE, "headers": headers}}))

    with pytest.raises(ConfigError, match=r"tracing\.headers") as raised:
        load_config(file, {}, {})

    assert "123456789" not in str(raised.value)


def test_headers_are_read_where_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("TENANT", "seven")
    headers = {"Authorization": {"file": str(file)}, "x-tenant": {"env": "TENANT"}}
    config = ClusterConfig.model_validate({"tracing": {"endpoint": HERE, "headers": headers}})

    assert SECRET not in json.dumps(config.model_dump(mode="json"))
    assert SECRET not in repr(config)
    assert config.tracing.read_headers() == {"authorization": SECRET, "x-tenant": "seven"}


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ValidationError, match="sample_ratio: has no effect"):
        TracingConfig(sample_ratio=0.5)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_sample_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ValidationError):
        TracingConfig(endpoint=HERE, sample_ratio=ratio)
