"""Every overlay, built by kustomize and checked without a cluster."""

import os
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.app.kuberay import arguments_of
from k8s.checks import problems
from k8s.made import FOLDER as MADE
from k8s.made import made_files
from k8s.objects import FOLDER, OVERLAYS, Object, build, label_of, of_kind, pods
from k8s.serving import serve_config
from tests.unit.k8s.built import NEEDS_CRDS, NEEDS_KUBECTL, objects_of, schemas

# `kubectl apply` keeps what it was given in an annotation, which may have so many bytes.
ANNOTATION_BYTES = 256 * 1024

pytestmark = NEEDS_KUBECTL


def test_the_overlays_are_those_that_the_issue_asks_for() -> None:
    assert OVERLAYS == ("gpu-13b", "gpu-7b", "head-fault-tolerance", "local", "multi-model")


@NEEDS_CRDS
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_in_order(overlay: str) -> None:
    assert list(problems(objects_of(overlay), schemas())) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_what_a_cluster_needs(overlay: str) -> None:
    kinds = {each["kind"] for each in objects_of(overlay)}

    assert {
        "Namespace",
        "RayService",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
        "ServiceAccount",
    } <= kinds
    # Nobody's key, and no example of one, is ever applied.
    assert "Secret" not in kinds


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_too_large_to_be_applied(overlay: str) -> None:
    for each in objects_of(overlay):
        assert len(str(each).encode()) < ANNOTATION_BYTES, label_of(each)


@pytest.mark.parametrize(
    ("overlay", "caps"),
    [
        ("local", {"apar-tiny": 64}),
        ("gpu-7b", {"apar-7b": 350}),
        ("gpu-13b", {"apar-13b": 180}),
        ("multi-model", {"apar-7b": 350, "apar-13b": 180}),
        ("head-fault-tolerance", {"apar-tiny": 64}),
    ],
)
def test_the_caps_are_those_of_the_presets(overlay: str, caps: dict[str, int]) -> None:
    [service] = of_kind(objects_of(overlay), "RayService")
    [app] = ServeDeploySchema.model_validate(serve_config(service)).applications
    models = arguments_of(app.args).cluster.models

    assert {model.public_name: model.requests_per_replica for model in models} == caps


def test_the_head_keeps_its_state_in_redis_where_it_is_fault_tolerant() -> None:
    def redis(overlay: str) -> Object | None:
        [service] = of_kind(objects_of(overlay), "RayService")
        options: Object | None = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        return options

    assert redis("local") is None
    assert redis("head-fault-tolerance") == {
        "redisAddress": "redis://apar-redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "apar-redis", "key": "password"}}},
    }


def test_each_overlay_runs_its_own_image() -> None:
    images = {
        overlay: {pod.container["image"] for pod in pods(objects_of(overlay)) if pod.ray_start}
        for overlay in OVERLAYS
    }

    assert images == {
        "gpu-13b": {"apar-serve:0.1.0-gpu"},
        "gpu-7b": {"apar-serve:0.1.0-gpu"},
        "multi-model": {"apar-serve:0.1.0-gpu"},
        "head-fault-tolerance": {"apar-serve:0.1.0-cpu"},
        "local": {"apar-serve:0.1.0-cpu"},
    }


@NEEDS_CRDS
def test_traces_and_shared_rates_have_their_ways_out(tmp_path: Path) -> None:
    components = ("tracing", "rate-storage")
    overlay = {
        "resources": [os.path.relpath(FOLDER / "overlays" / "local", tmp_path)],
        "components": [
            os.path.relpath(FOLDER / "components" / each, tmp_path) for each in components
        ],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    objects = build(tmp_path)
    [service] = of_kind(objects, "RayService")
    config = serve_config(service)
    config["applications"][0]["args"]["cluster"] |= {
        "tracing": {"endpoint": "http://collector.observability:4318"},
        "limits": {
            "rate_storage": "redis://redis.redis:6379",
            "rate_storage_password": {"env": "APAR_RATE_STORAGE_PASSWORD"},
        },
    }
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    assert list(problems(objects, schemas())) == []
    for pod in pods([service]):
        names = [each["name"] for each in pod.container["env"]]
        assert names == [
            "POD_IP",
            "OTEL_EXPORTER_OTLP_HEADERS",
            "APAR_RATE_STORAGE_PASSWORD",
        ]


def test_prometheus_keeps_its_own_namespace() -> None:
    """It is not moved to ours with everything else."""
    [binding] = of_kind(objects_of("local"), "RoleBinding")

    assert binding["metadata"]["namespace"] == "apar-serve"
    assert [each["namespace"] for each in binding["subjects"]] == ["monitoring"]


@pytest.mark.parametrize("name", sorted(made_files()))
def test_rules_and_dashboards_are_those_of_the_code(name: str) -> None:
    assert (MADE / name).read_text() == made_files()[name], "run `make k8s`"
