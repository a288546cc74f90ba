"""The gateway's deployment takes new settings while it runs."""

from pathlib import Path

import pytest

from cluster.logging_config import LoggingConfig
from cluster.routing_config import RoutingPolicy, RoutingSettings
from deployments.fair_queue import QueueState
from deployments.gateway import Gateway
from deployments.gateway_settings import GatewaySettings
from deployments.ingress import GatewayIngress, IngressSettings
from deployments.routing import registry


async def test_autoscaling_is_told_only_of_what_more_replicas_could_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = QueueState(1, 1, {"a": 5}, num_startable=2, oldest_wait_s=0.0)
    monkeypatch.setattr(Gateway, "waiting", lambda _: {"Replica-m": state})
    gateway = GatewaySettings(models=(), logging=LoggingConfig(folder=tmp_path))
    ingress = GatewayIngress.__mro__[1](IngressSettings(gateway=gateway, deployments=()))

    assert 2.0 in (await ingress.record_autoscaling_stats()).values()


async def test_new_routing_settings_reach_the_routers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configured: list[RoutingSettings] = []
    monkeypatch.setattr(registry, "configure", configured.append)
    gateway = GatewaySettings(models=(), logging=LoggingConfig(folder=tmp_path))
    # Ray Serve's wrapper around the class is made to be awaited; the class itself is below it.
    same = IngressSettings(gateway=gateway, deployments=())
    ingress = GatewayIngress.__mro__[1](same)
    changed = same.model_copy(update={"routing": RoutingSettings(policy=RoutingPolicy.RANDOM)})
    for settings in (same, changed, changed):
        await ingress.reconfigure(settings.as_user_config())
    assert configured == [changed.routing]
