"""The settings of routing, and what becomes of them."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policies import build_router
from deployments.routing.policies import Reason
from deployments.routing.ray_router import ThreadRequestRouter
from deployments.routing.ray_router import router_config
from deployments.wire.request import RequestHint
from tests.unit.deployments.routing.loads import IDLE


def test_ray_serve_makes_our_router_with_the_settings() -> None:
    settings = RoutingSettings(policy=RoutingPolicy.ROUND_ROBIN, affinity=0.5)
    config = router_config(settings)

    assert config.get_request_router_class() is ThreadRequestRouter
    assert RoutingSettings.model_validate(config.request_router_kwargs) == settings


def test_the_report_period_is_that_of_ray_serve() -> None:
    config = router_config(RoutingSettings(report_period_s=0.7))

    assert config.request_routing_stats_period_s == 0.7


@pytest.mark.parametrize(("entries", "remembered"), [(2, False), (3, True)])
def test_so_many_beginnings_are_remembered(entries: int, remembered: bool) -> None:
    router = build_router(RoutingSettings(affinity_entries=entries), seed=1)
    router.replicas_changed(dict.fromkeys("abcdefgh", 9))
    for name in "abcdefgh":
        router.reported(name, replace(IDLE, taken_at_s=0.0), 0.0)
    for prefix in (1, 2, 3):
        router.sent(str(prefix), "c", RequestHint(500, None, (prefix,)), 1.0)
        router.ended(str(prefix), None, 1.0)

    choices = {router.choose(RequestHint(500, None, (1,)), 2.0) for _ in range(20)}

    assert (choices == {"c"}) is remembered
    assert (router.decisions[Reason.AFFINITY] > 0) is remembered


def test_a_cluster_routes_by_threads_unless_told_otherwise() -> None:
    assert ClusterConfig().routing.policy is RoutingPolicy.THREADS
    config = ClusterConfig.model_validate({"routing": {"policy": "power_of_two"}})
    assert config.routing.policy is RoutingPolicy.POWER_OF_TWO


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"},
        {"affinity": -1},
        {"affinity": 2.1},
        {"report_period_s": 0.01},
        {"seed": 1},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RoutingSettings.model_validate(wrong)
