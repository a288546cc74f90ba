"""`serveConfigV2` is valid for Ray Serve and for our builder, and fits its pods."""

import json
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

from apar_core.step_costs.gpus import find_gpu
from deployments.app.ingress import GATEWAY
from deployments.app.kuberay import KubeRayArguments, application, arguments_of
from deployments.app.weights import repositories
from deployments.config import ConfigError
from deployments.config.model import ModelConfig
from deployments.gateway.settings import in_place_settings
from deployments.serve_flags import HAPROXY_SETTINGS, SERVE_FLAGS
from tests.fakes.overlays import (
    K8S,
    NEEDS_KUBECTL,
    OVERLAYS,
    Object,
    Pod,
    example_secrets,
    objects_of,
    of_kind,
    pods,
    ray_pods,
    serve_config,
    variant,
)
from tests.unit.k8s.test_network_policies import opens

pytestmark = NEEDS_KUBECTL
# Time for a replacement to load its weights and compile, and for Ray to stop.
ENGINE_START_S = 180.0
RAY_STOP_S = 30.0
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
        given = maps[source["configMapRef"]["name"]].items()
        assert (SERVE_FLAGS | HAPROXY_SETTINGS).items() <= given
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
            # Ray Serve stops the engine `drain_s` before the end, if its replacement runs or not.
            assert drain_s + ENGINE_START_S <= float(command[-1]) < grace_s - RAY_STOP_S
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > drain_s


def placement_problems(service: Object) -> list[str]:
    """Reasons why engines would wait for a pod forever, or GPUs would stay idle."""
    made = arguments(service)
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [engines] = [pod for pod in ray_pods([service]) if not pod.is_head]
    limits = engines.container["resources"]["limits"]
    models = made.cluster.models
    assert engines.ray_start is not None
    # JSON, quoted for the shell that KubeRay runs.
    resources = json.loads(" ".join(shlex.split(engines.ray_start["resources"])))
    found = []
    if made.gateway_resource not in resources:
        found.append("the gateway may start on the head, or nowhere")
    if made.device == "gpu":
        per_pod = float(limits["nvidia.com/gpu"])
        found += [
            f"{model.public_name}: no pod has {model.gpus_in_ray:g} GPUs"
            for model in models
            if model.gpus_in_ray > per_pod
        ]
    else:
        if made.engine_resource is None:
            found.append("without a resource of their own, engines may start on the head")
        per_pod = resources.get(made.engine_resource, 0)
        found += [
            f"{model.public_name}: {model.cpu_threads} threads on {limits['cpu']} cores"
            for model in models
            if (model.cpu_threads or 0) > int(limits["cpu"])
        ]

    def taken(model: ModelConfig) -> float:
        return model.gpus_in_ray if made.device == "gpu" else 1.0

    for name, field in (("replicas", "replicas"), ("max_replicas", "maxReplicas")):
        counts = [
            (taken(model), model.max_replicas if name == "max_replicas" else model.min_replicas)
            for model in models
        ]
        used = pods_for(per_pod, [size for size, count in counts for _ in range(count)])
        if used != group[field]:
            found.append(f"{name}: {used} pods are needed, not {group[field]}")
    return found


def pods_for(per_pod: float, engines: list[float]) -> int:
    """Count the pods that engines fill, first fit, the largest first."""
    room: list[float] = []
    for size in sorted(engines, reverse=True):
        for index, free in enumerate(room):
            if size <= free + 1e-9:
                room[index] -= size
                break
        else:
            room.append(per_pod - size)
    return len(room)


@EVERY
def test_every_engine_finds_a_pod_and_no_pod_is_idle(overlay: str) -> None:
    assert placement_problems(service_of(overlay)) == []


def gpu_service(serve: str, **parameters: str) -> Object:
    """The RayService of overlay `gpu` with other models and parameters."""
    text = (K8S / "overlays" / "gpu" / "serve.yaml").read_text(encoding="utf-8")
    head, found, _ = text.partition("          - checkpoint: apar-7b\n")
    assert found
    values = {name.replace("_", "-"): value for name, value in parameters.items()}
    [service] = of_kind(variant("gpu", parameters=values, serve=head + serve), "RayService")
    return service


SEVENTY = """
          - checkpoint: meta-llama/Llama-3.3-70B-Instruct
            replicas: {replicas}
            gpus_per_replica: 4
"""
SCALED = """
          - checkpoint: apar-7b
            autoscaling: {min_replicas: 1, max_replicas: 4}
"""
TWO_MODELS = """
          - checkpoint: apar-7b
            replicas: 2
          - checkpoint: apar-13b
"""


@pytest.mark.parametrize(
    ("serve", "parameters", "problems"),
    [
        (SEVENTY.format(replicas=2), {"pods": "2", "max_pods": "2", "gpus": "4"}, []),
        # Two pods with two GPUs have as many GPUs as the engine needs, but no pod has them.
        (
            SEVENTY.format(replicas=1),
            {"pods": "2", "max_pods": "2", "gpus": "2"},
            ["no pod has 4 GPUs", "replicas: 1 pods", "max_replicas: 1 pods"],
        ),
        (SCALED, {"pods": "1", "max_pods": "4"}, []),
        # `max_replicas` promises more than the pods can hold.
        (SCALED, {"pods": "1", "max_pods": "1"}, ["max_replicas: 4 pods are needed, not 1"]),
        (TWO_MODELS, {"pods": "3", "max_pods": "3"}, []),
        (TWO_MODELS, {"pods": "2", "max_pods": "2"}, ["replicas: 3", "max_replicas: 3"]),
        # Both engines of apar-7b run in one pod, so the second pod would be idle.
        (TWO_MODELS, {"pods": "2", "max_pods": "2", "gpus": "2"}, []),
    ],
)
def test_engines_that_would_wait_forever_are_found(
    serve: str, parameters: dict[str, str], problems: list[str]
) -> None:
    found = placement_problems(gpu_service(serve, **parameters))

    assert len(found) == len(problems), found
    for problem, each in zip(problems, found, strict=True):
        assert problem in each


@pytest.mark.parametrize(("gpus", "refused"), [("4", False), ("2", True)])
def test_the_builder_refuses_an_engine_with_more_gpus_than_a_pod(
    gpus: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = gpu_service(SEVENTY.format(replicas=1), gpus=gpus)
    head, engine = ray_pods([service])
    [app] = serve_config(service)["applications"]
    app["args"]["cluster"]["keys_file"] = str(tmp_path / "keys.yaml")
    (tmp_path / "keys.yaml").write_text(mounted_example(Path("/etc/apar/keys/keys.yaml"), head))
    # As the overlay sets it in the head pod, where the builder runs.
    for each in head.container["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    for name, value in SERVE_FLAGS.items():
        monkeypatch.setenv(name, value)

    assert engine.container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    if refused:
        with pytest.raises(ConfigError, match="gpus_per_replica 4 is above the 2 of a pod"):
            application(app["args"])
        return
    gateway: Any = application(app["args"])._bound_deployment
    replica = gateway.init_args[1]._bound_deployment
    # One actor, whose GPUs Ray takes from one node. In a placement group, vLLM would start its
    # workers as Ray actors instead of processes of the pod.
    assert replica.ray_actor_options["num_gpus"] == 4
    assert replica._replica_config.placement_group_bundles is None
    assert replica.init_args[0].engine["tensor_parallel_size"] == 4


def hardware_problems(service: Object) -> list[str]:
    """Models whose cap is in no plan for the GPU that the pods select."""
    [engines] = [pod for pod in ray_pods([service]) if not pod.is_head]
    gpu = find_gpu(engines.spec["nodeSelector"]["nvidia.com/gpu.product"])
    [term] = engines.spec["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    [memory] = term["matchExpressions"]
    assert memory["key"] == "nvidia.com/gpu.memory"
    # GPU Feature Discovery reports MiB, a little more or less than the data sheet's GB.
    found = []
    if not 0.9 < int(memory["values"][0]) * 2**20 / gpu.memory_bytes <= 1.06:
        found.append(f"{memory['values'][0]} MiB do not select {gpu.name}")
    plans = (K8S / "SIZING.md").read_text(encoding="utf-8")
    for model in arguments(service).cluster.models:
        name, cap = model.public_name, model.requests_per_replica
        title = f"{name.replace('apar', 'llama')} on "
        sections = [each for each in plans.split("\n## ") if each.startswith(title)]
        if not any(f"\n| {gpu.name} | forked | {cap} |" in each for each in sections):
            found.append(f"{name}: no plan for {cap} requests on {gpu.name}")
    return found


@pytest.mark.parametrize("overlay", ["gpu", "gpu-everything"])
def test_caps_fit_the_selected_gpu(overlay: str) -> None:
    assert hardware_problems(service_of(overlay)) == []


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (
            {"gpu_product": "NVIDIA-A100-SXM4-40GB", "gpu_memory_above_mib": "39000"},
            "apar-7b: no plan for 350 requests on a100-40gb",
        ),
        ({"gpu_memory_above_mib": "40000"}, "40000 MiB do not select h100"),
    ],
)
def test_a_cap_for_other_gpus_is_found(parameters: dict[str, str], problem: str) -> None:
    service = gpu_service("          - checkpoint: apar-7b\n", **parameters)

    assert problem in hardware_problems(service)


@pytest.mark.parametrize("overlay", ["gpu", "gpu-everything"])
def test_the_weights_of_all_models_are_downloaded_before_engines_start(overlay: str) -> None:
    objects = objects_of(overlay)
    [service] = of_kind(objects, "RayService")
    [engines] = [pod for pod in ray_pods(objects) if not pod.is_head]
    waiting, engine = engines.containers
    needed = {model.preset.path for model in arguments(service).cluster.models}
    values = [
        variable["value"]
        for pod in pods(objects)
        for each in pod.containers
        for variable in each.get("env", [])
        if variable["name"] == "APAR_WEIGHTS"
    ]

    assert [{name for name, _ in repositories(value)} for value in values] == [needed] * len(values)
    assert waiting["command"][:3] == ["python", "-m", "deployments.app.weights"]
    # Either a Job downloads and the pods wait, or each pod downloads.
    jobs = of_kind(objects, "Job")
    assert waiting["command"][3:] == (["--wait"] if jobs else [])
    environment = {each["name"]: each.get("value") for each in engine["env"]}
    mounts = {each["name"]: each for each in engine["volumeMounts"]}
    assert environment["HF_HOME"] == mounts["models"]["mountPath"]
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert mounts["models"]["readOnly"]


@pytest.mark.parametrize("overlay", ["gpu", "gpu-everything"])
def test_everything_that_is_compiled_at_a_start_is_kept_on_a_volume(overlay: str) -> None:
    [engines] = [pod for pod in ray_pods(objects_of(overlay)) if not pod.is_head]
    environment = {each["name"]: each.get("value") for each in engines.container["env"]}
    volumes = {each["name"]: each for each in engines.spec["volumes"]}
    [mount] = [each for each in engines.container["volumeMounts"] if each["name"] == "caches"]

    assert volumes["caches"].keys() & {"persistentVolumeClaim", "ephemeral"}
    for name in (
        "XDG_CACHE_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "CUDA_CACHE_PATH",
    ):
        assert str(environment[name]).startswith(mount["mountPath"])
    # Pods of different nodes share nothing.
    if "persistentVolumeClaim" in volumes["caches"]:
        assert mount["subPathExpr"] == "$(NODE_NAME)"


def test_traces_and_shared_rates_reach_their_namespaces() -> None:
    objects = objects_of("local-everything")

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
