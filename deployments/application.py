"""Composes the gateway and the replicas of all models into one Ray Serve application."""

import asyncio
import io
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, LoggingConfig

from cluster.config import ClusterConfig, StartError
from cluster.model_config import ModelConfig
from deployments.asgi_relay import AsgiApp
from deployments.gateway import Gateway, GatewaySettings, ServedModel
from deployments.replica import Replica, ReplicaSettings
from deployments.replica_calls import HandleCalls

APPLICATION = "apar"
GATEWAY = "Gateway"
MAX_CHOICES = 128
"""Most choices (`n`) of one request, as in OpenAI's API."""
_HEALTH_AGE_S = 1.0
# The gateway bounds its requests itself; Ray Serve's cap must never come first.
_NO_CAP = 1_000_000


class HealthOfReplicas:
    """Whether any replica runs, as the Serve controller sees it; asked once a second at most."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._healthy = False

    async def __call__(self) -> bool:
        """Whether a request would find a replica."""
        if time.monotonic() - self._asked_at > _HEALTH_AGE_S:
            self._healthy = await asyncio.to_thread(_any_replica_runs)
            self._asked_at = time.monotonic()
        return self._healthy


def _any_replica_runs() -> bool:
    application = serve.status().applications.get(APPLICATION)
    if application is None or application.status == ApplicationStatus.DELETING:
        return False
    return any(
        deployment.replica_states.get(ReplicaState.RUNNING, 0) > 0
        for name, deployment in application.deployments.items()
        if name != GATEWAY
    )


@serve.ingress()
class GatewayIngress:
    """The gateway as a Ray Serve ingress deployment."""

    def __init__(self, settings: GatewaySettings, *replicas: DeploymentHandle[Any]) -> None:
        calls = [HandleCalls(handle) for handle in replicas]
        self._gateway = Gateway(settings, calls, HealthOfReplicas())

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        return self._gateway


def engine_arguments(model: ModelConfig, *, on_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments: ours, the preset's over them, the user's over all."""
    arguments: dict[str, Any] = {"max_num_seqs": model.threads_per_replica}
    if on_gpu:
        if model.gpus_per_replica > 1:
            arguments["tensor_parallel_size"] = model.gpus_per_replica
        if model.gpu_memory_share is not None:
            arguments["gpu_memory_utilization"] = model.gpu_memory_share
    else:
        arguments |= {
            "block_size": 32,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": model.kv_cache_bytes,
        }
    arguments |= model.preset.engine | model.engine
    if limits := model.forks.model_dump(exclude_none=True):
        arguments["additional_config"] = arguments.get("additional_config", {}) | {"apar": limits}
    return arguments


def replica_environment(
    model: ModelConfig, *, on_gpu: bool, num_replicas: int = 1
) -> dict[str, str]:
    """Environment of a replica's process; vLLM reads these when it is imported.

    `num_replicas` share the machine's cores, of all models.
    """
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        # The concurrency cap counts requests, so one may not bring thousands of choices.
        "VLLM_MAX_N_SEQUENCES": str(MAX_CHOICES),
    }
    if on_gpu:
        return environment
    threads = model.cpu_threads or max(1, (os.cpu_count() or 1) // num_replicas)
    return environment | {
        # `auto` would pin every replica to the same first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # With the `uni` executor: the worker shares the engine's process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
    }


def build_replicas(model: ModelConfig, *, on_gpu: bool, num_replicas: int) -> serve.Application:
    """The replicas of one model."""
    environment = replica_environment(model, on_gpu=on_gpu, num_replicas=num_replicas)
    return serve.deployment(
        name=model.deployment_name,
        num_replicas=model.replicas,
        max_ongoing_requests=model.requests_per_replica,
        health_check_period_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        # What one start could not load, twenty cannot; a dead replica is replaced without limit.
        max_constructor_retry_count=1,
        ray_actor_options={
            "num_cpus": 0 if not on_gpu else 1,
            "num_gpus": model.gpus_in_ray if on_gpu else 0,
            "runtime_env": {"env_vars": environment},
        },
    )(Replica).bind(
        ReplicaSettings(
            model=model.preset.path,
            served_name=model.public_name,
            engine=engine_arguments(model, on_gpu=on_gpu),
            coalesce_s=model.coalesce_s,
        )
    )


def build_application(config: ClusterConfig, *, on_gpu: bool = False) -> serve.Application:
    """The application, ready for `serve.run`."""
    replicas = [
        build_replicas(model, on_gpu=on_gpu, num_replicas=config.num_replicas)
        for model in config.models
    ]
    served = tuple(
        ServedModel(
            name=model.public_name,
            max_running=model.replicas * model.requests_per_replica,
            max_queued=model.max_queued_requests,
        )
        for model in config.models
    )
    return serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=_NO_CAP,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
    )(GatewayIngress).bind(GatewaySettings(models=served), *replicas)


@contextmanager
def running(config: ClusterConfig) -> Iterator[str]:
    """Run the application on the Ray cluster that is connected; yields its base URL.

    Raises StartError if a replica cannot start. On leaving, a private cluster's Serve is shut
    down, on another one only our application is deleted.
    """
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=config.host, port=config.port),
        logging_config=quiet,
    )
    try:
        try:
            serve.run(
                build_application(config, on_gpu=on_gpu),
                name=APPLICATION,
                route_prefix="/",
                logging_config=quiet,
            )
        except RuntimeError as error:
            raise StartError(_reason(error)) from error
        yield f"http://{_url_host(config.host)}:{config.port}"
    finally:
        if config.ray_address is None:
            # Ray prints that the controller's calls fail, when they end with the controller.
            with redirect_stdout(io.StringIO()):
                serve.shutdown()
        else:
            serve.delete(APPLICATION)


def _reason(error: RuntimeError) -> str:
    """Why the application did not start: the controller knows more than the exception."""
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return str(error)
    messages = [item.message for item in application.deployments.values() if item.message]
    return "\n".join([application.message, *messages]) or str(error)


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
