"""Tracing changes in a running application."""

from typing import Any

from deployments.app.application import ClusterFacts, build_application
from deployments.app.ingress import IngressSettings
from deployments.config import ClusterConfig
from deployments.gateway.settings import gateway_settings
from tests.fakes.replicas import FakeReplicas, gateway_of, settings_of

HERE = ClusterFacts(num_replicas=1, core_shares={}, generation="one")
ENDPOINT = "http://127.0.0.1:1"


def config(**tracing: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"tracing": {"endpoint": ENDPOINT} | tracing})


def built(config: ClusterConfig) -> dict[str, Any]:
    gateway: Any = build_application(config, HERE)._bound_deployment
    return {each.name: each for each in (gateway, gateway.init_args[1]._bound_deployment)}


def test_gateway_and_replicas_get_the_source_of_the_headers() -> None:
    given = config(headers={"authorization": {"env": "COLLECTOR"}})

    gateway, replica = built(given).values()

    carried = IngressSettings.from_user_config(gateway._deployment_config.user_config)
    assert carried.gateway.tracing == given.tracing == gateway_settings(given).tracing
    assert replica.init_args[0].tracing == given.tracing


def test_another_source_of_a_secret_replaces_the_replicas_and_not_the_gateway() -> None:
    one, other = (built(config(headers={"authorization": {"env": name}})) for name in "ab")

    assert [one[name].version == other[name].version for name in one] == [True, False]


async def test_a_running_gateway_changes_its_tracing() -> None:
    replicas = FakeReplicas()
    gateway = gateway_of(replicas)
    assert gateway.tracing is None

    await gateway.reconfigure(settings_of(1, tracing=config().tracing), [replicas])
    first = gateway.tracing
    await gateway.reconfigure(settings_of(1, tracing=config(sample_ratio=0.5).tracing), [replicas])

    assert first is not None
    assert gateway.tracing is not None
    assert gateway.tracing is not first
    assert gateway.tracing.config.sample_ratio == 0.5
