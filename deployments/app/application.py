"""Compose the gateway and the replicas of all models into one Ray Serve application."""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import serve

from apar_core.engine.replay import REPLAY
from apar_core.installation import has_compiler
from apar_core.scheduler.row_limits import largest_graph
from deployments.app.autoscaling import gateway_autoscaling, model_autoscaling
from deployments.app.ingress import APPLICATION, GATEWAY, GatewayIngress, IngressSettings
from deployments.config import ClusterConfig
from deployments.config.model import ModelConfig, multiplies_bfloat16
from deployments.gateway.settings import gateway_settings
from deployments.replica.replica import Replica, ReplicaSettings
from deployments.routing.ray_router import router_config
from deployments.serve_flags import APPLICATION_FLAGS

__all__ = ["APPLICATION", "GATEWAY", "build_application"]

MAX_CHOICES = 128
"""Maximum of `n`, the choices of one request, as in OpenAI's API."""
# The gateway limits its requests itself; Ray Serve's cap must never apply first.
_NO_CAP = 1_000_000
_HUNG_GATEWAY_S = 10.0
# Options that give an engine core several workers, each a process of its own.
_SPLITTING = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
# One additional replica during a rollout, for up to 100 replicas; Ray rounds up.
_ONE_MORE_PERCENT = 1


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts about the cluster that replicas are built for.

    The cores are shared by `num_replicas`, the replicas of all models. A model in `core_shares`
    keeps the number it was started with. Replicas of one `generation` stay when the application is
    deployed again without a change to them. `has_room` tells whether a new replica fits beside the
    one it replaces. `engine_resource` is a custom Ray resource of which each replica takes one, and
    `gateway_resource` one of which the gateway takes a thousandth.
    """

    on_gpu: bool = False
    num_replicas: int = 1
    core_shares: Mapping[str, int] = field(default_factory=dict)
    generation: str = field(default_factory=lambda: uuid.uuid4().hex)
    has_room: bool = True
    drain_s: float = 30.0
    engine_resource: str | None = None
    gateway_resource: str | None = None

    def version(self, *facts: Any) -> str:
        """Return the version of a deployment; Ray Serve replaces replicas of another version."""
        text = json.dumps([self.generation, *facts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def engine_arguments(model: ModelConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments: ours, overridden by the preset's, then by the user's."""
    arguments: dict[str, Any] = {"max_num_seqs": model.threads_per_replica}
    if on_gpu:
        if model.tensor_parallel_size > 1:
            arguments["tensor_parallel_size"] = model.tensor_parallel_size
        if model.gpu_memory_share is not None:
            arguments["gpu_memory_utilization"] = model.gpu_memory_share
    else:
        is_split = any(model.engine.get(name, 1) > 1 for name in _SPLITTING)
        arguments |= {
            "block_size": 32,
            "distributed_executor_backend": "mp" if is_split else "uni",
            "kv_cache_memory_bytes": model.kv_cache_bytes,
        }
        if model.preset.is_small and not multiplies_bfloat16():
            arguments["dtype"] = "float32"
        # The CPU image has no compiler. Small models are mostly for trying out, where compiling
        # takes too long: SmolLM2-135M is ready after 33 s without and after 93 s with it.
        if model.preset.is_small or not has_compiler():
            arguments["enforce_eager"] = True
    arguments |= model.preset.engine | model.engine
    settings = model.forks.model_dump(exclude_none=True, exclude={"tool_call_starts"})
    if model.tool_call_starts:
        settings["tool_call_starts"] = model.tool_call_starts
    if model.coalesce_s > 0:
        settings["output_interval_s"] = model.coalesce_s
    if model.adapters:
        adapters = [{"name": each.name, "path": each.folder} for each in model.adapters]
        # By default vLLM runs one adapter per step, so that requests to others would wait.
        lora = {"enable_lora": True, "max_loras": len(adapters), "lora_modules": adapters}
        arguments = lora | arguments
        given = {each.name: each.forks for each in model.adapters if each.forks is not None}
        settings |= {"adapters": given} if given else {}
    if (adapter := model.fork_adapter_folder) is not None:
        settings["fork_adapter"] = str(adapter)
    if (marks := model.parallel_format) is not None:
        settings["parallel_format"] = marks.model_dump(mode="json", exclude_defaults=True)
    if (chain := model.prompt_chain) is not None:
        settings["prompt_tokens"] = chain.path
        arguments["speculative_config"] = chain.speculative_config
    if model.attention == "family":
        settings["attention"] = model.attention
        if limits := model.family.model_dump(exclude_none=True):
            settings["family"] = limits
    if on_gpu and (size := largest_graph(arguments)) is not None:
        arguments["max_cudagraph_capture_size"] = size
    if settings:
        arguments["additional_config"] = arguments.get("additional_config", {}) | {"apar": settings}
    if model.replay:
        arguments["logits_processors"] = [*arguments.get("logits_processors", ()), REPLAY]
    return arguments


def replica_environment(
    model: ModelConfig, *, on_gpu: bool, num_replicas: int = 1
) -> dict[str, str]:
    """Return the environment of a replica's process, which vLLM reads when it is imported.

    The cores are shared by `num_replicas`, the replicas of all models.
    """
    environment = APPLICATION_FLAGS | {
        "VLLM_NO_USAGE_STATS": "1",
        # The concurrency cap counts requests, so the choices of one must be limited.
        "VLLM_MAX_N_SEQUENCES": str(MAX_CHOICES),
    }
    if on_gpu:
        return environment
    share = max(1, (os.cpu_count() or 1) // num_replicas)
    threads = model.cpu_threads or model.preset.cpu_threads or share
    if engine_arguments(model, on_gpu=False).get("enforce_eager"):
        # The sampler would still compile small functions, which takes half a minute in a process
        # that compiles nothing else, and saves nothing on a CPU.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment | {
        # `auto` would pin every replica to the same first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The `uni` executor runs the worker in the engine's process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
    }


def build_replicas(
    model: ModelConfig, config: ClusterConfig, facts: ClusterFacts
) -> serve.Application:
    """Build the deployment of a model's replicas."""
    on_gpu = facts.on_gpu
    share = facts.core_shares.get(model.deployment_name, facts.num_replicas)
    settings = ReplicaSettings(
        model=model.preset.path,
        served_name=model.public_name,
        engine=engine_arguments(model, on_gpu=on_gpu),
        coalesce_s=model.coalesce_s,
        logging=config.logging,
        metrics=config.metrics.enabled,
        metrics_port=config.metrics_port_of_nodes,
        tracing=config.tracing,
    )
    autoscaling = model_autoscaling(model)
    deployment = serve.deployment(
        name=model.deployment_name,
        num_replicas=model.replicas if autoscaling is None else None,
        autoscaling_config=autoscaling,
        max_ongoing_requests=model.requests_per_replica,
        health_check_period_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=facts.drain_s,
        request_router_config=router_config(
            config.routing, is_lone=autoscaling is None and model.replicas == 1
        ),
        # A model that fails to load once will fail again. Dead replicas are replaced regardless;
        # `deployments.serve_controller` makes a restarted controller do so, too.
        max_constructor_retry_count=1,
        max_surge_percent=_ONE_MORE_PERCENT if facts.has_room else 0,
        ray_actor_options={
            "num_cpus": 0 if not on_gpu else 1,
            "num_gpus": model.gpus_in_ray if on_gpu else 0,
            "resources": {facts.engine_resource: 1} if facts.engine_resource else {},
            "runtime_env": {
                "env_vars": replica_environment(model, on_gpu=on_gpu, num_replicas=share)
            },
        },
    )(Replica)
    version = facts.version(settings.model_dump(mode="json"), config.restart_id)
    # Without a version, Ray Serve replaces all replicas at each deployment.
    return deployment.options(version=version, _internal=True).bind(settings)


def build_application(
    config: ClusterConfig,
    facts: ClusterFacts | None = None,
    *,
    served: ClusterConfig | None = None,
) -> serve.Application:
    """Build the application for `serve.run`, with replicas for all models of `config`.

    The gateway offers the models of `served`, which must be among them; by default all.
    """
    known = facts or ClusterFacts(num_replicas=config.num_replicas, drain_s=config.drain_s)
    replicas = [build_replicas(model, config, known) for model in config.models]
    offered = served or config
    settings = gateway_settings(offered)
    ingress = IngressSettings(
        gateway=settings,
        deployments=tuple(model.deployment_name for model in offered.models),
        routing=config.routing,
    )
    # The processes of a private cluster already have the flags; without a runtime environment they
    # start faster.
    runtime_env = {} if config.ray_address is None else {"env_vars": APPLICATION_FLAGS}
    deployment = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=_NO_CAP,
        autoscaling_config=gateway_autoscaling(config, known.gateway_resource),
        # The next gateway starts before the last one stops. One per node leaves no room for that.
        max_surge_percent=0 if config.gateways == "per-node" else _ONE_MORE_PERCENT,
        ray_actor_options={
            "num_cpus": 0,
            "resources": {known.gateway_resource: 0.001} if known.gateway_resource else {},
            "runtime_env": runtime_env,
        },
        # After three checks without an answer, a hung gateway is replaced.
        health_check_timeout_s=_HUNG_GATEWAY_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=known.drain_s,
        user_config=ingress.as_user_config(),
    )(GatewayIngress)
    if config.gateways == "per-node":
        deployment = deployment.options(max_replicas_per_node=1)
    version = known.version(config.restart_id)
    return deployment.options(version=version, _internal=True).bind(ingress, *replicas)
