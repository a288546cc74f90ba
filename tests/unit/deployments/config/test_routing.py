"""Settings of `routing`."""

import pytest
from pydantic import ValidationError

from deployments.config import ClusterConfig
from deployments.config.routing import RoutingPolicy, RoutingSettings


def test_a_cluster_routes_by_threads_unless_configured_otherwise() -> None:
    assert ClusterConfig().routing.policy is RoutingPolicy.THREADS
    config = ClusterConfig.model_validate({"routing": {"policy": "power_of_two"}})
    assert config.routing.policy is RoutingPolicy.POWER_OF_TWO


@pytest.mark.parametrize(
    "invalid",
    [
        {"policy": "best"},
        {"affinity": -1},
        {"affinity": 2.1},
        {"report_period_s": 0.01},
        {"seed": 1},
    ],
)
def test_invalid_settings_are_refused(invalid: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RoutingSettings.model_validate(invalid)
