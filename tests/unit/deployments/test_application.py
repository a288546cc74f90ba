"""What each setting becomes in Ray Serve and in vLLM."""

from typing import Any

import pytest
from ray.serve.schema import LoggingConfig

from cluster.config import ServeConfig
from deployments.application import (
    build_application,
    engine_arguments,
    replica_environment,
)
from deployments.gateway import GatewaySettings
from deployments.replica import ReplicaSettings


def deployments(config: ServeConfig) -> tuple[GatewaySettings, ReplicaSettings, object]:
    gateway = build_application(config)._bound_deployment
    arguments: Any = gateway.init_args
    settings, replica = arguments
    return settings, replica._bound_deployment.init_args[0], replica._bound_deployment


def test_limits_reach_gateway_and_replica() -> None:
    config = ServeConfig(replicas=3, max_concurrency=10, max_queued_requests=7, coalesce_s=0.02)

    gateway, replica, deployment = deployments(config)

    assert gateway.max_running == 30
    assert gateway.max_queued == 7
    assert gateway.model == replica.served_name == "apar-tiny"
    assert replica.coalesce_s == 0.02
    assert deployment.max_ongoing_requests == 10  # type: ignore[attr-defined]  # Ray's own class
    assert deployment.num_replicas == 3  # type: ignore[attr-defined]  # Ray's own class


def test_engine_arguments_are_ours_then_the_presets_then_the_users() -> None:
    config = ServeConfig(
        model="apar-7b", threads_per_request=2, kv_cache_gib=1, engine={"block_size": 64}
    )

    assert engine_arguments(config, on_gpu=False) == {
        "max_num_seqs": 700,
        "block_size": 64,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 2**30,
        "max_model_len": 2048,
    }
    assert engine_arguments(config, on_gpu=True) == {
        "max_num_seqs": 700,
        "block_size": 64,
        "max_model_len": 2048,
    }


def test_replicas_on_cpu_share_the_cores() -> None:
    environment = replica_environment(ServeConfig(cpu_threads=3), on_gpu=False)

    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in replica_environment(ServeConfig(), on_gpu=True)


@pytest.mark.parametrize("field", ["enable_access_log", "log_level"])
def test_the_logging_settings_that_we_set_exist(field: str) -> None:
    assert field in LoggingConfig.model_fields
