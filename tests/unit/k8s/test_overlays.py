"""Every overlay, built by kustomize: complete, consistent, hardened."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from ray.serve.schema import ServeDeploySchema

from dashboards.grafana import dashboards
from deployments.app.kuberay import arguments_of
from deployments.config.metrics import DEFAULT_PORT
from k8s.__main__ import FILE, prometheus_rule
from k8s.__main__ import main as write_rule
from tests.fakes.overlays import (
    K8S,
    NEEDS_KUBECTL,
    OVERLAYS,
    Object,
    Pod,
    example_secrets,
    label_of,
    matches,
    objects_of,
    of_kind,
    pods,
    ray_pods,
    serve_config,
    variant,
)
from tests.fakes.rules import rule_groups

# `kubectl apply` stores an object in one of its annotations, which has this limit.
ANNOTATION_BYTES = 256 * 1024
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

pytestmark = NEEDS_KUBECTL
EVERY = pytest.mark.parametrize("overlay", OVERLAYS)


@EVERY
def test_an_overlay_has_what_a_cluster_needs(overlay: str) -> None:
    kinds = {each["kind"] for each in objects_of(overlay)}

    assert {
        "Namespace",
        "RayService",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "ConfigMap",
        "ServiceAccount",
    } <= kinds
    # Neither keys nor their examples are ever applied.
    assert "Secret" not in kinds


@pytest.mark.parametrize("overlay", ["local", "head-fault-tolerance", "gpu"])
def test_an_overlay_needs_no_custom_resource_but_those_of_kuberay(overlay: str) -> None:
    groups = {each["apiVersion"].rpartition("/")[0] for each in objects_of(overlay)}

    builtin = {"", "batch", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io"}
    assert groups - builtin == {"ray.io"}


@EVERY
def test_no_object_is_too_large_to_apply(overlay: str) -> None:
    for each in objects_of(overlay):
        assert len(str(each).encode()) < ANNOTATION_BYTES, label_of(each)


@pytest.mark.parametrize(
    ("overlay", "image", "caps"),
    [
        ("local", "apar-serve:0.1.0-cpu", {"apar-tiny": 64}),
        ("head-fault-tolerance", "apar-serve:0.1.0-cpu", {"apar-tiny": 64}),
        ("gpu", "apar-serve:0.1.0-gpu", {"apar-7b": 350}),
        ("gpu-everything", "apar-serve:0.1.0-gpu", {"apar-7b": 350}),
    ],
)
def test_images_and_caps_of_an_overlay(overlay: str, image: str, caps: dict[str, int]) -> None:
    objects = objects_of(overlay)
    [service] = of_kind(objects, "RayService")
    [app] = ServeDeploySchema.model_validate(serve_config(service)).applications
    models = arguments_of(app.args).cluster.models

    images = {
        each["image"]
        for pod in pods(objects)
        for each in pod.containers
        if not each["image"].startswith("redis:")
    }
    assert images == {image}
    assert {model.public_name: model.requests_per_replica for model in models} == caps


def test_only_a_fault_tolerant_head_keeps_its_state_in_redis() -> None:
    def redis(overlay: str) -> Object | None:
        [service] = of_kind(objects_of(overlay), "RayService")
        options: Object | None = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        return options

    assert redis("local") is None
    assert redis("head-fault-tolerance") == {
        "redisAddress": "redis://apar-redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "apar-redis", "key": "password"}}},
    }


def test_rules_and_dashboards_are_current() -> None:
    config_maps = of_kind(objects_of("local-everything"), "ConfigMap")
    maps = {each["metadata"]["name"]: each for each in config_maps}

    assert FILE.read_text(encoding="utf-8") == prometheus_rule(), "run `make k8s`"
    for uid, text in dashboards().items():
        config_map = maps[f"dashboard-{uid}"]
        assert config_map["data"] == {f"{uid}.json": text}
        # Grafana's sidecar looks for this label.
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_prometheus_rule_has_the_groups_of_the_rule_files(tmp_path: Path) -> None:
    assert yaml.safe_load(prometheus_rule())["spec"]["groups"] == rule_groups()

    (tmp_path / "mine.yml").write_text("groups:\n- name: mine\n  rules: []\n")
    write_rule(tmp_path, tmp_path / "rule.yaml")

    own = yaml.safe_load((tmp_path / "rule.yaml").read_text())
    assert own["spec"] == {"groups": [{"name": "mine", "rules": []}]}


@pytest.mark.parametrize(("name", "problem"), [("r.yml", "r.yml has no line"), ("r", "no rule")])
def test_a_folder_without_rules_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / name).write_text("rules: []\n")

    with pytest.raises(typer.BadParameter, match=problem):
        prometheus_rule(tmp_path)


@pytest.mark.parametrize("overlay", ["local", "gpu"])
def test_every_parameter_reaches_an_object(overlay: str) -> None:
    values = {
        "cluster": "a-cluster", "pods": "101", "max-pods": "103", "available-pods": "97",
        "gpus": "89", "gpu-product": "A-GPU", "gpu-memory-above-mib": "70001", "cpu": "83",
        "memory": "79Gi", "weights": "someone/model", "storage-class": "a-class",
        "weights-size": "73Gi",
    }  # fmt: skip
    lines = (K8S / "overlays" / overlay / "parameters.env").read_text().splitlines()
    names = {line.partition("=")[0] for line in lines if not line.startswith("#")}
    built = yaml.safe_dump(variant(overlay, ("monitoring",), parameters=values))

    assert names <= values.keys()
    lost = [name for name in names if not re.search(rf"[ ']{values[name]}('|$)", built, re.M)]
    assert lost == []


@EVERY
def test_all_objects_are_in_one_namespace(overlay: str) -> None:
    for each in objects_of(overlay):
        key = "name" if each["kind"] == "Namespace" else "namespace"
        assert each["metadata"].get(key) == "apar-serve", label_of(each)


def test_the_prometheus_account_stays_in_its_own_namespace() -> None:
    bindings = of_kind(objects_of("local-everything"), "RoleBinding")
    namespaces = {
        each["metadata"]["name"]: [subject["namespace"] for subject in each["subjects"]]
        for each in bindings
    }

    assert namespaces == {"prometheus": ["monitoring"], "apar-autoscaler": ["apar-serve"]}


@EVERY
def test_every_reference_exists(overlay: str) -> None:
    objects = objects_of(overlay)
    known = {(each["kind"], each["metadata"]["name"]) for each in [*objects, *example_secrets()]}

    for pod in pods(objects):
        assert set(_references(pod)) <= known, pod.owner
    for binding in of_kind(objects, "RoleBinding"):
        assert ("Role", binding["roleRef"]["name"]) in known
    if of_kind(objects, "StatefulSet"):
        assert {("Secret", "apar-redis"), ("Service", "apar-redis")} <= known


def _references(pod: Pod) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod.spec["serviceAccountName"]
    for volume in pod.spec.get("volumes", []):
        if secret := volume.get("secret"):
            yield "Secret", secret["secretName"]
        if config_map := volume.get("configMap"):
            yield "ConfigMap", config_map["name"]
        if claim := volume.get("persistentVolumeClaim"):
            yield "PersistentVolumeClaim", claim["claimName"]
    for container in pod.containers:
        for source in container.get("envFrom", []):
            yield "ConfigMap", source["configMapRef"]["name"]
        for variable in container.get("env", []):
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", reference["name"]


@EVERY
def test_every_selector_selects_a_pod(overlay: str) -> None:
    objects = objects_of(overlay)
    for each in objects:
        spec = each.get("spec", {})
        selector = {
            "PodDisruptionBudget": spec.get("selector"),
            "PodMonitor": spec.get("selector"),
            "StatefulSet": spec.get("selector"),
            "NetworkPolicy": spec.get("podSelector"),
            "Service": {"matchLabels": spec.get("selector", {})},
        }.get(each["kind"])
        if selector is not None:
            assert _selected(objects, selector), label_of(each)


def _selected(objects: list[Object], selector: Object) -> list[Pod]:
    return [pod for pod in pods(objects) if matches(selector, pod.labels)]


@EVERY
def test_with_monitoring_each_ray_pod_has_one_monitor_of_its_metrics_port(overlay: str) -> None:
    objects = objects_of(overlay)
    watched = []
    for monitor in of_kind(objects, "PodMonitor"):
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        role = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        # Ours where there are engines, and Ray's own on the head.
        assert endpoint["port"] == ("metrics" if role == "engine" else "ray-metrics")
        watched += [pod.owner for pod in _selected(objects, monitor["spec"]["selector"])]
        constants = {
            each["targetLabel"]: each["replacement"]
            for each in endpoint["relabelings"]
            if "sourceLabels" not in each
        }
        # What the rules select, and by which they keep clusters apart.
        assert constants["job"] == ("apar" if role == "engine" else "ray")
        assert constants["cluster"] == "default"

    expected = ray_pods(objects) if overlay.endswith("-everything") else []
    assert sorted(watched) == sorted(pod.owner for pod in expected)
    for pod in ray_pods(objects):
        assert pod.ray_start is not None
        assert pod.ray_start["metrics-export-port"] == str(pod.ports["ray-metrics"])
        assert pod.is_head or pod.ports["metrics"] == DEFAULT_PORT


@EVERY
def test_services_point_to_ports_of_their_pods(overlay: str) -> None:
    objects = objects_of(overlay)
    for service in of_kind(objects, "Service"):
        for pod in _selected(objects, {"matchLabels": service["spec"]["selector"]}):
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= pod.ports.keys()
    [service] = of_kind(objects, "RayService")
    [port] = service["spec"]["serveService"]["spec"]["ports"]
    # KubeRay requires this name.
    assert port["name"] == "serve"
    assert {pod.ports["serve"] for pod in ray_pods(objects)} == {port["targetPort"]}


@EVERY
def test_budgets_keep_pods_and_still_allow_a_drain(overlay: str) -> None:
    objects = objects_of(overlay)
    for budget in of_kind(objects, "PodDisruptionBudget"):
        # KubeRay's pods have no controller from which Kubernetes could compute a percentage.
        least = budget["spec"]["minAvailable"]
        count = sum(pod.count for pod in _selected(objects, budget["spec"]["selector"]))
        assert isinstance(least, int)
        assert least <= count
        assert least < count or count == 1


@EVERY
def test_pods_are_hardened(overlay: str) -> None:
    for pod in pods(objects_of(overlay)):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"], pod.owner
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        # Only the autoscaler, beside the head, uses the Kubernetes API.
        autoscales = pod.spec["serviceAccountName"] == "apar-autoscaler"
        assert pod.spec["automountServiceAccountToken"] is autoscales
        assert not autoscales or pod.is_head
        assert pod.spec.keys().isdisjoint({"hostNetwork", "hostPID", "hostIPC"})
        for container in pod.containers:
            assert container["securityContext"] == HARDENED


@EVERY
def test_containers_write_only_to_bounded_volumes(overlay: str) -> None:
    for pod in pods(objects_of(overlay)):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for volume in volumes.values():
            assert "hostPath" not in volume
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": None})
        for container in pod.containers:
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert "/tmp" in mounts or "--wait" in container["command"], pod.owner
            # A changed Secret does not reach a running pod through subPath.
            assert all("subPath" not in mount for mount in mounts.values())


@EVERY
def test_containers_have_resources_a_pinned_image_and_probes(overlay: str) -> None:
    for pod in pods(objects_of(overlay)):
        for container in pod.containers:
            for bound in ("requests", "limits"):
                resources = container["resources"][bound]
                assert {"cpu", "memory", "ephemeral-storage"} <= resources.keys(), pod.owner
                assert "0" not in map(str, resources.values()), pod.owner
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            assert tag not in ("", "latest"), pod.owner
        if pod.owner.startswith("Job/"):
            continue
        for name in ("livenessProbe", "readinessProbe"):
            probe = pod.container[name]
            port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
            assert port is None or port in pod.ports


def test_key_records_are_examples_only() -> None:
    [example] = [each for each in example_secrets() if each["metadata"]["name"] == "apar-keys"]

    assert [each["name"] for each in yaml.safe_load(example["stringData"]["keys.yaml"])] == [
        "example"
    ]
