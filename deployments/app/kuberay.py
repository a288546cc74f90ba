"""Application builder for Ray Serve's declarative configuration, as deployed by KubeRay.

Instead of `apar serve`, Ray Serve calls `application` with the `args` of the configuration. It does
so in a process on the head pod, possibly before the replicas' pods have joined.
"""

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve

from deployments.app.application import ClusterFacts, build_application
from deployments.config import ClusterConfig, ConfigError, problems_of
from deployments.serve_flags import SERVE_FLAGS

GPUS_PER_POD = "APAR_GPUS_PER_POD"
"""Environment variable of the head pod: GPUs of each engine pod."""

_SET_ELSEWHERE = {
    "host": "http_options.host",
    "port": "http_options.port",
    "ray_address": "the Ray cluster that runs the application",
}


class KubeRayArguments(BaseModel):
    """The `args` of the application in a Ray Serve configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "gpu"] = Field(
        description="Device of the engines. Not detected, because their pods may join later."
    )
    cluster: ClusterConfig = Field(
        description="Configuration as for `apar serve`, without `host`, `port` and `ray_address`, "
        "which are set elsewhere in Ray Serve's configuration."
    )
    engine_resource: str | None = Field(
        None,
        min_length=1,
        description="Ray resource of which each engine takes one, to keep engines on the pods that "
        "have it. On CPU, nothing else does so.",
    )
    gateway_resource: str | None = Field(
        None,
        min_length=1,
        description="Ray resource of which the gateway takes a thousandth, to keep it on the pods "
        "that have it. Otherwise it may start on the head.",
    )
    spare_room: bool = Field(
        False,
        description="Whether pods have room for one more engine. If so, a rollout starts the new "
        "engine before it stops the old one; otherwise one engine is missing meanwhile.",
    )


def application(args: dict[str, Any]) -> serve.Application:
    """Build the application from `args`, see `KubeRayArguments`.

    Raises ConfigError that names the field, before any replica starts. KubeRay shows the message
    in the RayService's status.
    """
    _check_flags()
    arguments = arguments_of(args)
    if arguments.device == "gpu" and GPUS_PER_POD in os.environ:
        check_gpus(arguments.cluster, int(os.environ[GPUS_PER_POD]))
    config = arguments.cluster
    config.check_keys_file()
    facts = ClusterFacts(
        on_gpu=arguments.device == "gpu",
        num_replicas=config.num_replicas,
        has_room=arguments.spare_room,
        drain_s=config.drain_s,
        engine_resource=arguments.engine_resource,
        gateway_resource=arguments.gateway_resource,
    )
    return build_application(config, facts)


def arguments_of(args: dict[str, Any]) -> KubeRayArguments:
    """Validate the arguments; raises ConfigError."""
    cluster = args.get("cluster", {})
    if not isinstance(cluster, dict):
        raise ConfigError("args.cluster: a mapping of settings is expected")
    for name in sorted(_SET_ELSEWHERE.keys() & cluster.keys()):
        raise ConfigError(f"args.cluster.{name}: leave it out; it is {_SET_ELSEWHERE[name]}")
    # The pods are reachable from outside, so `cluster` must configure keys or allow_anonymous.
    reachable = args | {"cluster": cluster | {"host": "0.0.0.0", "ray_address": "auto"}}
    try:
        arguments = KubeRayArguments.model_validate(reachable)
    except ValidationError as error:
        raise ConfigError(f"args.{problems_of(error, KubeRayArguments)}") from None
    for model in arguments.cluster.models:
        # The default, the number of this machine's cores, would be the head pod's.
        if arguments.device == "cpu" and model.cpu_threads is None:
            raise ConfigError(
                f"args.cluster.models: {model.public_name}: set `cpu_threads` to its pod's cores"
            )
    return arguments


def check_gpus(config: ClusterConfig, gpus_per_pod: int) -> None:
    """Raise ConfigError for a model whose replicas do not fit into a pod.

    A replica is one Ray actor, and Ray takes all GPUs of an actor from one node, as a placement
    group with STRICT_PACK would. Without such a node Ray waits for one forever.
    """
    for model in config.models:
        if model.num_gpus > gpus_per_pod:
            raise ConfigError(
                f"args.cluster.models: {model.public_name}: gpus_per_replica "
                f"{model.num_gpus} is above the {gpus_per_pod} of a pod (nvidia.com/gpu of "
                "the worker group): all GPUs of a replica must be in one pod"
            )


def _check_flags() -> None:
    missing = sorted(f"{name}={value}" for name, value in SERVE_FLAGS.items() - os.environ.items())
    if missing:
        raise ConfigError(
            f"the environment of every pod of the cluster needs {', '.join(missing)}: Ray Serve "
            "reads it when it starts"
        )
