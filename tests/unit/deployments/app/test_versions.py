"""Replicas that a rollout replaces: those whose version or process settings changed."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.app.application import ClusterFacts, build_application
from deployments.app.ingress import IngressSettings
from deployments.app.service import core_shares
from deployments.config import ClusterConfig
from deployments.config.model import ForkLimits, ModelConfig

A, B = ModelConfig(name="a"), ModelConfig(name="b")
HERE = ClusterFacts(num_replicas=1, core_shares={"Replica-a": 1})


def built(*models: ModelConfig, facts: ClusterFacts = HERE) -> dict[str, tuple[Any, ...]]:
    """Return, per deployment, the facts that make Ray Serve replace its replicas."""
    application = build_application(ClusterConfig(models=models), facts)
    gateway: Any = application._bound_deployment
    deployments = [gateway, *(each._bound_deployment for each in gateway.init_args[1:])]
    return {each.name: (each.version, each.ray_actor_options) for each in deployments}


def test_the_same_settings_replace_nothing() -> None:
    assert built(A, B) == built(A, B)


def test_a_new_model_replaces_neither_the_others_nor_the_gateway() -> None:
    before, after = built(A), built(A, B, facts=replace(HERE, num_replicas=2))

    assert before.items() <= after.items()


@pytest.mark.parametrize(
    "change",
    [{"max_concurrency": 3}, {"forks": ForkLimits(max_threads=2)}, {"engine": {"seed": 1}}],
)
def test_settings_of_an_engine_replace_its_replicas_only(change: dict[str, Any]) -> None:
    before, after = built(A, B), built(A.model_copy(update=change), B)

    assert before["Replica-a"] != after["Replica-a"]
    assert before["Replica-b"] == after["Replica-b"]
    assert before["Gateway"] == after["Gateway"]


@pytest.mark.parametrize("change", [{"max_queued_requests": 3}, {"replicas": 2}])
def test_gateway_limits_and_replica_counts_replace_nothing(change: dict[str, Any]) -> None:
    assert built(A) == built(A.model_copy(update=change))


def test_a_restart_of_the_server_replaces_everything() -> None:
    before, after = built(A), built(A, facts=replace(HERE, generation="other"))

    assert set(before) == set(after) == {"Gateway", "Replica-a"}
    assert all(before[name] != after[name] for name in before)


def test_an_unchanged_model_keeps_its_share_of_the_cores() -> None:
    old = ClusterConfig(models=(A, B))
    more = A.model_copy(update={"replicas": 3})
    other = B.model_copy(update={"max_concurrency": 3})

    shares = core_shares(ClusterConfig(models=(more, other)), {"Replica-a": 2, "Replica-b": 2}, old)

    assert shares == {"Replica-a": 2, "Replica-b": 4}
    assert core_shares(old, {}, None) == {"Replica-a": 2, "Replica-b": 2}


def test_the_gateway_offers_only_the_served_models() -> None:
    application = build_application(
        ClusterConfig(models=(A, B)), HERE, served=ClusterConfig(models=(B,))
    )

    settings = IngressSettings.from_user_config(application._bound_deployment.user_config)
    assert settings.deployments == ("Replica-b",)
    assert [model.name for model in settings.gateway.models] == ["b"]


def test_replicas_get_time_to_drain_and_surge_only_if_there_is_room() -> None:
    config = ClusterConfig(models=(A,), drain_s=7)
    gateways: list[Any] = [
        build_application(config, replace(HERE, drain_s=7, has_room=room))._bound_deployment
        for room in (True, False)
    ]
    roomy, tight = (
        gateway.init_args[1]._bound_deployment._deployment_config for gateway in gateways
    )

    assert roomy.graceful_shutdown_timeout_s == 7
    assert (roomy.max_surge_percent, tight.max_surge_percent) == (1, 0)
