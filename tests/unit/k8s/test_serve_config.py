"""`serveConfigV2` is valid for Ray Serve and for our builder, and fits its pods."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from cluster.local_ray import SERVE_FLAGS
from deployments.app.ingress import GATEWAY
from deployments.app.kuberay import KubeRayArguments, application, arguments_of
from deployments.gateway.settings import in_place_settings
from tests.fakes.overlays import (
    K8S,
    NEEDS_KUBECTL,
    OVERLAYS,
    Object,
    Pod,
    build,
    example_secrets,
    objects_of,
    of_kind,
    ray_pods,
    serve_config,
)
from tests.unit.k8s.test_network_policies import opens

pytestmark = NEEDS_KUBECTL
EVERY = pytest.mark.parametrize("overlay", OVERLAYS)


def service_of(overlay: str) -> Object:
    [service] = of_kind(objects_of(overlay), "RayService")
    return service


def arguments(service: Object) -> KubeRayArguments:
    """The parsed `args` of the application."""
    return arguments_of(serve_config(service)["applications"][0]["args"])


@EVERY
def test_ray_serve_knows_every_field(overlay: str) -> None:
    def check(values: dict[str, Any], schema: type[BaseModel]) -> None:
        assert values.keys() <= schema.model_fields.keys()

    config = serve_config(service_of(overlay))
    ServeDeploySchema.model_validate(config)
    # Ray Serve itself ignores unknown fields.
    check(config, ServeDeploySchema)
    check(config["http_options"], HTTPOptionsSchema)
    for app in config["applications"]:
        check(app, ServeApplicationSchema)
        for deployment in app.get("deployments", []):
            check(deployment, DeploymentSchema)


@EVERY
def test_every_pod_serves_on_its_serve_port(overlay: str) -> None:
    service = service_of(overlay)
    config = serve_config(service)

    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}
    assert config["proxy_location"] == "EveryNode"
    assert {pod.ports["serve"] for pod in ray_pods([service])} == {8000}


@EVERY
def test_pods_have_the_environment_that_ray_serve_needs(overlay: str) -> None:
    objects = objects_of(overlay)
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    for pod in ray_pods(objects):
        [source] = pod.container["envFrom"]
        assert SERVE_FLAGS.items() <= maps[source["configMapRef"]["name"]].items()
        # The preStop hook reads it.
        assert "POD_IP" in {each["name"] for each in pod.container["env"]}


@EVERY
def test_the_builder_makes_the_deployments(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(overlay)
    [app] = serve_config(service)["applications"]
    head, *_ = ray_pods([service])
    keys = tmp_path / "keys.yaml"
    keys.write_text(mounted_example(Path(app["args"]["cluster"]["keys_file"]), head))
    app["args"]["cluster"]["keys_file"] = str(keys)
    for name, value in SERVE_FLAGS.items():
        monkeypatch.setenv(name, value)

    gateway: Any = application(app["args"])._bound_deployment

    assert app["import_path"] == "deployments.app.kuberay:application"
    assert app["route_prefix"] == "/"
    names = [gateway.name, *(each._bound_deployment.name for each in gateway.init_args[1:])]
    for deployment in app.get("deployments", []):
        assert deployment["name"] in names
        if deployment["name"] == GATEWAY:
            in_place_settings(deployment["user_config"])


def mounted_example(path: Path, pod: Pod) -> str:
    """Content of a path in a pod, from the example of the Secret that is mounted there."""
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    [mount] = [
        mount
        for mount in pod.container["volumeMounts"]
        if path.is_relative_to(mount["mountPath"]) and mount["mountPath"] != "/"
    ]
    secret = volumes[mount["name"]]["secret"]["secretName"]
    [example] = [each for each in example_secrets() if each["metadata"]["name"] == secret]
    return str(example["stringData"][str(path.relative_to(mount["mountPath"]))])


@EVERY
def test_every_pod_mounts_the_keys(overlay: str) -> None:
    service = service_of(overlay)
    keys_file = arguments(service).cluster.keys_file
    assert keys_file is not None

    for pod in ray_pods([service]):
        assert yaml.safe_load(mounted_example(keys_file, pod))


@EVERY
def test_pods_end_after_their_requests(overlay: str) -> None:
    service = service_of(overlay)
    drain_s = arguments(service).cluster.drain_s
    for pod in ray_pods([service]):
        grace_s = pod.spec["terminationGracePeriodSeconds"]
        assert grace_s > drain_s
        if not pod.is_head:
            command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
            assert "deployments.app.pod_drain" in command
            assert drain_s < float(command[-1]) < grace_s
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > drain_s


@EVERY
def test_pods_have_the_resources_that_engines_request(overlay: str) -> None:
    service = service_of(overlay)
    made = arguments(service)
    [engines] = [pod for pod in ray_pods([service]) if not pod.is_head]
    limits = engines.container["resources"]["limits"]
    if made.device == "gpu":
        gpus = sum(model.max_replicas * model.gpus_in_ray for model in made.cluster.models)
        assert gpus == engines.count * int(limits["nvidia.com/gpu"])
        return
    assert engines.ray_start is not None
    # JSON, quoted for the shell that KubeRay runs.
    resources = json.loads(" ".join(shlex.split(engines.ray_start["resources"])))
    # Without a resource of their own, engines may start on the head.
    assert made.engine_resource is not None
    assert made.cluster.num_replicas == engines.count * resources[made.engine_resource]
    for model in made.cluster.models:
        assert (model.cpu_threads or 0) <= int(limits["cpu"])


def test_traces_and_shared_rates_reach_their_namespaces(tmp_path: Path) -> None:
    overlay = {
        "resources": [os.path.relpath(K8S / "overlays" / "local", tmp_path)],
        "components": [
            os.path.relpath(K8S / "components" / each, tmp_path)
            for each in ("tracing", "rate-storage")
        ],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    objects = build(tmp_path)

    for pod in ray_pods(objects):
        for namespace, port in (("observability", 4318), ("redis", 6379)):
            labels = {"kubernetes.io/metadata.name": namespace}
            assert opens(objects, "egress", pod, labels, {}, port)
        # As named in k8s/README.md.
        assert [each["name"] for each in pod.container["env"]] == [
            "POD_IP",
            "OTEL_EXPORTER_OTLP_HEADERS",
            "APAR_RATE_STORAGE_PASSWORD",
        ]
