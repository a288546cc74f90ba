"""`serveConfigV2`: as Ray Serve reads it, as our builder reads it, and beside its pods."""

import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from cluster.config import ClusterConfig, ConfigError
from cluster.local_ray import SERVE_FLAGS
from deployments.app.ingress import GATEWAY
from deployments.app.kuberay import KubeRayArguments, application, arguments_of
from deployments.gateway.settings import in_place_settings
from k8s.network import lets_out
from k8s.objects import Object, Pod, example_secrets, label_of, of_kind, pods

IMPORT_PATH = "deployments.app.kuberay:application"


def problems(objects: list[Object]) -> Iterator[str]:
    """What is wrong with each RayService's application, or between it and its pods."""
    for service in of_kind(objects, "RayService"):
        label = label_of(service)
        try:
            loaded = serve_config(service)
            yield from (f"{label}: serveConfigV2: {name}" for name in _unknown(loaded))
            config = ServeDeploySchema.model_validate(loaded)
            [app] = config.applications
            arguments = arguments_of(app.args)
        except (ValueError, ConfigError, yaml.YAMLError) as error:
            yield f"{label}: serveConfigV2: {error}"
            continue
        ray = [pod for pod in pods([service]) if pod.ray_start is not None]
        for problem in (
            *_address(config, ray),
            *_flags(objects, ray),
            *_application(app.model_dump(exclude_unset=True), arguments, ray),
            *_times(service, arguments.cluster.drain_s, ray),
            *_room(arguments, ray[1:]),
            *_elsewhere(objects, arguments.cluster, ray),
        ):
            yield f"{label}: {problem}"


def serve_config(service: Object) -> dict[str, Any]:
    """What stands in a RayService's `serveConfigV2`."""
    loaded = yaml.safe_load(service["spec"]["serveConfigV2"])
    if not isinstance(loaded, dict):
        raise ValueError("a mapping is expected")
    return loaded


def _unknown(loaded: dict[str, Any]) -> Iterator[str]:
    """Fields that Ray Serve does not know, and passes over in silence."""

    def unknown(values: Any, schema: type[BaseModel], place: str) -> Iterator[str]:
        if isinstance(values, dict):
            yield from (
                f"{place}{name}: Ray Serve knows no such field"
                for name in values.keys() - schema.model_fields.keys()
            )

    yield from unknown(loaded, ServeDeploySchema, "")
    yield from unknown(loaded.get("http_options"), HTTPOptionsSchema, "http_options.")
    for app in loaded.get("applications", []):
        yield from unknown(app, ServeApplicationSchema, "applications.")
        for deployment in app.get("deployments", []):
            yield from unknown(deployment, DeploymentSchema, "applications.deployments.")


def _address(config: ServeDeploySchema, ray: list[Pod]) -> Iterator[str]:
    if config.http_options.host != "0.0.0.0":
        yield f"http_options.host: others cannot reach {config.http_options.host}"
    if config.proxy_location != "EveryNode":
        yield "proxy_location: EveryNode is needed, or only the head takes requests"
    for pod in ray:
        if pod.ports.get("serve") != config.http_options.port:
            yield f"{pod.owner}: its port serve is not http_options.port"


def _flags(objects: list[Object], ray: list[Pod]) -> Iterator[str]:
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    for pod in ray:
        environment = {each["name"]: each.get("value") for each in pod.container.get("env", [])}
        for source in pod.container.get("envFrom", []):
            environment |= maps.get(source.get("configMapRef", {}).get("name"), {})
        if missing := sorted(name for name, _ in SERVE_FLAGS.items() - environment.items()):
            yield f"{pod.owner}: its environment lacks {', '.join(missing)}"
        if "POD_IP" not in environment:
            yield f"{pod.owner}: its environment lacks POD_IP, which the preStop hook reads"


def _application(app: dict[str, Any], arguments: KubeRayArguments, ray: list[Pod]) -> Iterator[str]:
    if app["import_path"] != IMPORT_PATH:
        yield f"import_path: {IMPORT_PATH} is expected"
    if app.get("route_prefix", "/") != "/":
        yield "route_prefix: the gateway's paths begin at /"
    if arguments.cluster.keys_file is not None:
        for pod in ray:
            if _key_in_secret(arguments.cluster.keys_file, pod) is None:
                yield f"{pod.owner}: no Secret is mounted as {arguments.cluster.keys_file}"
    yield from _secrets(arguments.cluster, ray)
    with tempfile.TemporaryDirectory() as folder:
        try:
            names = _built_names(app["args"], Path(folder), ray)
        except ConfigError as error:
            yield f"args: {error}"
            return
    for deployment in app.get("deployments", []):
        name = deployment["name"]
        if name not in names:
            yield f"deployments: {name} is none of {', '.join(names)}"
        if name == GATEWAY and "user_config" in deployment:
            try:
                in_place_settings(deployment["user_config"])
            except ConfigError as error:
                yield f"deployments: {name}: {error}"


def _secrets(config: ClusterConfig, ray: list[Pod]) -> Iterator[str]:
    """Environment variables named as places of secrets that a pod does not have."""
    places = {
        "limits.cache_secret": config.limits.cache_secret,
        "limits.rate_storage_password": config.limits.rate_storage_password,
        **{f"tracing.headers.{name}": place for name, place in config.tracing.headers.items()},
    }
    for field, place in places.items():
        for pod in ray:
            known = {each["name"] for each in pod.container.get("env", [])}
            if place is not None and place.env is not None and place.env not in known:
                yield f"{pod.owner}: {field} is read from {place.env}, which the pod does not have"


def _built_names(args: dict[str, Any], folder: Path, ray: list[Pod]) -> list[str]:
    """Names of the deployments that the builder makes, with the Secret's example for the keys."""
    cluster = dict(args["cluster"])
    if "keys_file" in cluster:
        keys = folder / "keys.yaml"
        keys.write_text(_key_in_secret(Path(cluster["keys_file"]), ray[0]) or "[]")
        cluster["keys_file"] = str(keys)
    before = dict(os.environ)
    try:
        os.environ.update(SERVE_FLAGS)
        gateway: Any = application(args | {"cluster": cluster})._bound_deployment
    finally:
        os.environ.clear()
        os.environ.update(before)
    return [gateway.name, *(each._bound_deployment.name for each in gateway.init_args[1:])]


def _key_in_secret(path: Path, pod: Pod) -> str | None:
    """What the example of the Secret, mounted in the pod, has at a path; None where nothing is."""
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    for mount in pod.container.get("volumeMounts", []):
        secret = volumes.get(mount["name"], {}).get("secret", {}).get("secretName")
        if secret is None or not path.is_relative_to(mount["mountPath"]):
            continue
        for each in example_secrets():
            if each["metadata"]["name"] == secret:
                key = str(path.relative_to(mount["mountPath"]))
                value: str | None = each["stringData"].get(key)
                return value
    return None


def _times(service: Object, drain_s: float, ray: list[Pod]) -> Iterator[str]:
    for pod in ray:
        grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        if grace_s <= drain_s:
            yield f"{pod.owner}: is killed after {grace_s} s, and draining may take {drain_s:.0f} s"
        hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        if "head" in pod.owner:
            continue
        if "deployments.app.pod_drain" not in hook.get("command", []):
            yield f"{pod.owner}: ends without emptying its Ray node first"
        elif not drain_s < float(hook["command"][-1]) < grace_s:
            yield f"{pod.owner}: preStop takes {hook['command'][-1]} s, not between drain and end"
    if service["spec"].get("rayClusterDeletionDelaySeconds", 60) <= drain_s:
        yield "rayClusterDeletionDelaySeconds: the old cluster ends before its requests"


def _room(arguments: KubeRayArguments, workers: list[Pod]) -> Iterator[str]:
    """Whether the pods have what the engines ask for."""
    models = arguments.cluster.models
    if arguments.device == "gpu":
        wanted = sum(model.max_replicas * model.gpus_in_ray for model in models)
        there = sum(pod.count * _limit(pod, "nvidia.com/gpu") for pod in workers)
        if wanted > there:
            yield f"engines take {wanted:g} GPUs, and pods have {there:g}"
        return
    for model in models:
        for pod in workers:
            if (model.cpu_threads or 0) > _limit(pod, "cpu"):
                yield f"{model.public_name}: cpu_threads are more than the cores of {pod.owner}"
    if arguments.engine_resource is None:
        yield "engine_resource: without it engines may start on the head"
        return
    there = sum(
        pod.count * _ray_resources(pod).get(arguments.engine_resource, 0) for pod in workers
    )
    if arguments.cluster.num_replicas > there:
        yield f"{arguments.cluster.num_replicas} engines, and pods for {there:g}"


def _elsewhere(objects: list[Object], config: ClusterConfig, ray: list[Pod]) -> Iterator[str]:
    """What of other namespaces (NAME.NAMESPACE) is needed, and network policies close."""
    policies = of_kind(objects, "NetworkPolicy")
    for field, address in (
        ("tracing.endpoint", config.tracing.endpoint or ""),
        ("limits.rate_storage", config.limits.rate_storage),
    ):
        url = urlsplit(address)
        _, _, domain = (url.hostname or "").partition(".")
        namespace = domain.removesuffix(".cluster.local").removesuffix(".svc")
        if not namespace or "." in namespace:
            continue  # Beside us, or outside of the cluster, of which selectors say nothing.
        labels = {"kubernetes.io/metadata.name": namespace}
        port = url.port or (443 if url.scheme == "https" else 80)
        for pod in ray:
            if not lets_out(policies, pod, labels, {}, port, "TCP"):
                yield f"{pod.owner}: no network policy lets it reach {field}, {url.hostname}"


def _limit(pod: Pod, name: str) -> float:
    amount = str(pod.container["resources"]["limits"].get(name, "0"))
    return float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)


def _ray_resources(pod: Pod) -> dict[str, float]:
    """Custom resources of a pod's Ray node: JSON, quoted for the shell that KubeRay runs."""
    words = shlex.split((pod.ray_start or {}).get("resources", "{}"))
    resources: dict[str, float] = json.loads(" ".join(words))
    return resources
