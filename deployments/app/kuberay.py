"""Builds the application for Ray Serve's declarative configuration, which KubeRay deploys.

There nobody runs `apar serve`: Ray Serve calls `application` with the `args` of the configuration,
in a process on the head pod, where the pods of the replicas may not yet have joined.
"""

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve

from cluster.config import ClusterConfig, ConfigError, problems_of
from cluster.local_ray import SERVE_FLAGS
from deployments.app.application import Surroundings, build_application

_EVERYWHERE = "0.0.0.0"
_OF_SERVE = {
    "host": "http_options.host",
    "port": "http_options.port",
    "ray_address": "the Ray cluster that runs the application",
}


class KubeRayArguments(BaseModel):
    """The `args` of the application in a Ray Serve configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "gpu"] = Field(
        description="What engines run on. Not looked up: their pods may join later."
    )
    cluster: ClusterConfig = Field(
        description="A cluster's configuration as for `apar serve`, without `host`, `port` and "
        "`ray_address`, which Ray Serve's configuration has in other places."
    )
    engine_resource: str | None = Field(
        None,
        min_length=1,
        description="Ray resource of which each engine takes one; keeps engines on the pods that "
        "have it. On CPU nothing else does.",
    )
    spare_room: bool = Field(
        False,
        description="Whether pods have room for a new engine beside those that run. Then a changed "
        "engine starts before the old one ends; else after, and one engine is missing meanwhile.",
    )


def application(args: dict[str, Any]) -> serve.Application:
    """The application that `args` describe, see `KubeRayArguments`.

    Raises ConfigError that names the field. What is checked here fails before any replica starts,
    and KubeRay shows the message in the RayService's status.
    """
    _check_flags()
    arguments = arguments_of(args)
    config = arguments.cluster
    config.check_keys_file()
    surroundings = Surroundings(
        on_gpu=arguments.device == "gpu",
        num_replicas=config.num_replicas,
        has_room=arguments.spare_room,
        drain_s=config.drain_s,
        engine_resource=arguments.engine_resource,
    )
    return build_application(config, surroundings)


def arguments_of(args: dict[str, Any]) -> KubeRayArguments:
    """The checked arguments; raises ConfigError."""
    cluster = args.get("cluster", {})
    if not isinstance(cluster, dict):
        raise ConfigError("args.cluster: a mapping of settings is expected")
    for name in sorted(_OF_SERVE.keys() & cluster.keys()):
        raise ConfigError(f"args.cluster.{name}: leave it out; it is {_OF_SERVE[name]}")
    # Others reach the pods, so `cluster` must say who may call.
    reachable = args | {"cluster": cluster | {"host": _EVERYWHERE}}
    try:
        arguments = KubeRayArguments.model_validate(reachable)
    except ValidationError as error:
        raise ConfigError(f"args.{problems_of(error)}") from None
    _check_device(arguments)
    return arguments


def _check_device(arguments: KubeRayArguments) -> None:
    """Refuse what would be looked up on the head pod, and be wrong for the others."""
    for model in arguments.cluster.models:
        if arguments.device == "cpu" and model.cpu_threads is None:
            raise ConfigError(
                f"args.cluster.models: {model.public_name}: set `cpu_threads` to its pod's cores"
            )


def _check_flags() -> None:
    missing = sorted(f"{name}={value}" for name, value in SERVE_FLAGS.items() - os.environ.items())
    if missing:
        raise ConfigError(
            f"the environment of every pod of the cluster needs {', '.join(missing)}: Ray Serve "
            "reads it when it starts"
        )
