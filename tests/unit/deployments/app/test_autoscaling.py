"""Ray Serve policies: from the reports of replicas and gateways to the wanted replicas."""

import time
from dataclasses import asdict
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingContext

from deployments.app.autoscaling import (
    ModelPolicy,
    gateway_autoscaling,
    gateway_report,
    model_autoscaling,
)
from deployments.app.waiting_board import BOARD, MAX_AGE_S, WaitingBoard
from deployments.autoscaling import ReplicaReport
from deployments.config import ClusterConfig
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.model import ModelConfig

MODEL = ModelConfig(
    autoscaling=AutoscalingConfig(max_replicas=4, target_threads=10, upscale_delay_s=0)
)


def policy() -> ModelPolicy:
    found = model_autoscaling(MODEL)
    assert found is not None
    # Pickled as for the controller: the copy must read the same board.
    copied = cloudpickle.loads(found.policy.get_serialized_policy_def() or b"")
    policy: ModelPolicy = copied(**found.policy.policy_kwargs)
    return policy


def context(name: str, running: int, metrics: dict[str, dict[str, float]], **fields: Any) -> Any:
    values: dict[str, Any] = {
        "deployment_id": DeploymentID(name=name, app_name="apar"),
        "deployment_name": name,
        "app_name": "apar",
        "current_num_replicas": running,
        "target_num_replicas": running,
        "running_replicas": [],
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": metrics,
        "raw_metrics": {},
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 4,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": None,
        "config": None,
    }
    return AutoscalingContext(**values | fields)


def reported(*threads: float) -> dict[str, dict[str, float]]:
    reports = [asdict(ReplicaReport(2, each, 0, kv_use=0.1)) for each in threads]
    return {
        name: {str(number): report[name] for number, report in enumerate(reports)}
        for name in reports[0]
    }


def test_the_threads_of_all_replicas_count() -> None:
    assert policy()(context("Replica-x", 2, reported(15, 14)))[0] == 3
    assert policy()(context("Replica-x", 2, reported(10, 10)))[0] == 2


def test_requests_waiting_at_handles_and_in_gateways_count() -> None:
    # 4 requests have 20 threads, so each waiting request adds 5.
    metrics = reported(10, 10)
    assert policy()(context("Replica-w", 2, metrics, total_queued_requests=2.0))[0] == 3

    gateways = {
        name: {"one": count, "other": count}
        for name, count in gateway_report({"Replica-w": 2}).items()
    }
    reporting = gateway_autoscaling(ClusterConfig(models=(MODEL,)))
    serialized = reporting.policy.get_serialized_policy_def()
    unchanged, _ = cloudpickle.loads(serialized or b"")()(context("Gateway", 2, gateways))

    assert unchanged == 2
    assert policy()(context("Replica-w", 2, metrics))[0] == 4
    assert policy()(context("Replica-other", 2, metrics))[0] == 2


def test_without_reports_nothing_is_removed() -> None:
    assert policy()(context("Replica-x", 3, {}))[0] == 3


def test_entries_of_the_board_expire() -> None:
    board, now = WaitingBoard(), time.monotonic()
    board.write({"a": 3.0}, now)

    assert board.read("a", now + MAX_AGE_S) == 3
    assert board.read("a", now + MAX_AGE_S + 1) == 0
    assert board.read("b", now) == 0


def test_ray_serve_gets_the_bounds_and_no_delays() -> None:
    found = model_autoscaling(MODEL)

    assert found is not None
    assert (found.min_replicas, found.max_replicas) == (1, 4)
    assert (found.upscale_delay_s, found.downscale_delay_s) == (0, 0)
    assert found.policy.get_policy().__name__ == "ModelPolicy"
    assert model_autoscaling(ModelConfig(replicas=3)) is None


@pytest.fixture(autouse=True)
def _empty_board() -> None:
    BOARD.write({"Replica-w": 0.0}, time.monotonic())
