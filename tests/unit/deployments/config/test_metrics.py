"""The configuration's `metrics`, field by field."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.local_ray import free_port, metrics_port
from deployments.app.service import check_change
from deployments.config import ClusterConfig, ConfigError
from deployments.config.metrics import DEFAULT_PORT, MetricsConfig
from deployments.gateway.settings import gateway_settings


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_enabled_turns_metrics_of_gateway_and_replicas_on_and_off() -> None:
    off = ClusterConfig(metrics=MetricsConfig(enabled=False))

    assert not gateway_settings(off).metrics
    assert gateway_settings(ClusterConfig()).metrics


def test_a_configured_port_is_taken_or_refused_by_name(taken_port: int) -> None:
    free = free_port()

    assert metrics_port(MetricsConfig(port=free)) == free
    assert metrics_port(MetricsConfig(port=0)) not in (0, free)
    with pytest.raises(ConfigError, match=rf"metrics\.port: .*:{taken_port}"):
        metrics_port(MetricsConfig(port=taken_port))


def test_a_free_port_is_used_if_the_default_is_taken(
    taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.local_ray.DEFAULT_PORT", taken_port)
    assert metrics_port(MetricsConfig()) not in (0, taken_port)

    monkeypatch.setattr("cluster.local_ray.DEFAULT_PORT", free := free_port())
    assert metrics_port(MetricsConfig()) == free


def test_only_processes_of_a_running_ray_cluster_serve_their_nodes_metrics() -> None:
    def port(**fields: Any) -> int | None:
        return gateway_settings(ClusterConfig(**fields)).metrics_port

    assert port() is None
    assert port(ray_address="auto") == DEFAULT_PORT
    assert port(ray_address="auto", metrics=MetricsConfig(port=9000)) == 9000
    assert port(ray_address="auto", metrics=MetricsConfig(enabled=False)) is None


def test_metrics_change_only_with_a_restart() -> None:
    with pytest.raises(ConfigError, match="metrics: cannot be changed"):
        check_change(ClusterConfig(), ClusterConfig(metrics=MetricsConfig(port=3)))


@pytest.mark.parametrize("fields", [{"port": 70000}, {"port": -1}, {"report_s": 5}])
def test_invalid_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        MetricsConfig.model_validate(fields)
