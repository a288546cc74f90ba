"""Private names and behaviour of Ray Serve that rollouts, draining and autoscaling rely on."""

import inspect
from typing import Any

from ray import serve
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve._private.router import AsyncioRouter, CurrentLoopRouter
from ray.serve._private.version import DeploymentVersion
from ray.serve.config import AutoscalingContext
from ray.serve.deployment import Deployment
from ray.serve.handle import DeploymentHandle


class Nothing:
    """A deployment."""


def test_a_deployment_takes_a_version_and_keeps_it() -> None:
    deployment: Any = serve.deployment(Nothing)
    versioned = deployment.options(version="1", _internal=True)

    assert versioned.version == "1"
    assert versioned.options(num_replicas=2).version == "1"
    assert "max_surge_percent" in inspect.signature(Deployment.options).parameters


def test_replicas_of_an_equal_version_are_kept() -> None:
    source = inspect.getsource(DeploymentVersion.requires_actor_restart)

    assert "self.code_version != new_version.code_version" in source
    assert "init_args" not in source


def test_the_replicas_that_run_can_be_read_off_a_handle() -> None:
    assert "self._router: Optional[Router] = _router" in inspect.getsource(
        DeploymentHandle.__init__
    )
    assert "self._asyncio_router = AsyncioRouter(" in inspect.getsource(CurrentLoopRouter.__init__)
    assert isinstance(AsyncioRouter.request_router, property)
    assert isinstance(RequestRouter.curr_replicas, property)
    assert hasattr(DeploymentHandle, "broadcast")


def test_a_policy_learns_what_was_reported_by_whom() -> None:
    parameters = inspect.signature(AutoscalingContext.__init__).parameters

    assert {
        "aggregated_metrics",
        "total_queued_requests",
        "current_num_replicas",
        "target_num_replicas",
        "deployment_name",
    } <= set(parameters)
    # Made once, so that it may keep what it last decided on.
    assert "_resolve_policy_callable" in inspect.getsource(DeploymentAutoscalingState.register)
