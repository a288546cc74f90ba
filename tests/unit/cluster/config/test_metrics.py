"""The configuration's `metrics`, field by field."""

import socket
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from cluster.config import ClusterConfig, ConfigError
from cluster.config.metrics import DEFAULT_PORT, MetricsConfig
from cluster.local_ray import free_port, metrics_environment, metrics_port
from deployments.app.service import check_change
from deployments.gateway.settings import gateway_settings


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_enabled_turns_recording_and_rays_agents_on_and_off() -> None:
    off = ClusterConfig(metrics=MetricsConfig(enabled=False))

    assert not gateway_settings(off).metrics
    assert gateway_settings(ClusterConfig()).metrics
    assert metrics_environment(off.metrics) == {"RAY_enable_metrics_collection": "0"}
    assert metrics_port(off.metrics) == 0


def test_report_s_reaches_rays_processes() -> None:
    assert metrics_environment(MetricsConfig(report_s=2.5)) == {
        "RAY_metrics_report_interval_ms": "2500"
    }


def test_a_configured_port_is_taken_or_refused_by_name(taken_port: int) -> None:
    free = free_port()

    assert metrics_port(MetricsConfig(port=free)) == free
    assert metrics_port(MetricsConfig(port=0)) == 0
    with pytest.raises(ConfigError, match=rf"metrics\.port: .*:{taken_port}"):
        metrics_port(MetricsConfig(port=taken_port))


def test_a_free_port_is_used_if_the_default_is_taken(
    taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.local_ray.DEFAULT_PORT", taken_port)
    assert metrics_port(MetricsConfig()) == 0

    monkeypatch.setattr("cluster.local_ray.DEFAULT_PORT", free := free_port())
    assert metrics_port(MetricsConfig()) == free


def test_a_running_ray_cluster_has_a_port_of_its_own() -> None:
    with pytest.raises(ValidationError, match="--metrics-export-port"):
        ClusterConfig(ray_address="auto", metrics=MetricsConfig(port=DEFAULT_PORT))
    assert ClusterConfig(ray_address="auto", metrics=MetricsConfig(enabled=False)).ray_address


def test_metrics_change_only_with_a_restart() -> None:
    with pytest.raises(ConfigError, match="metrics: cannot be changed"):
        check_change(ClusterConfig(), ClusterConfig(metrics=MetricsConfig(report_s=3)))


@pytest.mark.parametrize("fields", [{"port": 70000}, {"report_s": 0.5}, {"interval": 1}])
def test_invalid_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        MetricsConfig.model_validate(fields)
