"""A mistake in an object of any kind is found, and named."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from k8s.checks import problems
from k8s.objects import Object, of_kind
from tests.unit.k8s.built import NEEDS_CRDS, NEEDS_KUBECTL, objects_of, schemas

CPU, GPU = "head-fault-tolerance", "gpu-7b"
PLACES = {
    "@head": "spec/rayClusterConfig/headGroupSpec/template/spec",
    "@engine": "spec/rayClusterConfig/workerGroupSpecs/0/template/spec",
    "@container": "spec/template/spec/containers/0",
    "-container": "/containers/0",
}
GONE = object()

pytestmark = [NEEDS_KUBECTL, NEEDS_CRDS]


def put(each: Any, path: str, value: Any) -> None:
    """Set what a path leads to, or take it away."""
    for name, place in PLACES.items():
        path = path.replace(name, place)
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in way:
        each = each[step]
    if value is GONE:
        del each[last]
    else:
        each[last] = value


def found_with(overlay: str, kind: str, name: str, change: Callable[[Object], None]) -> list[str]:
    objects = objects_of(overlay)
    [each] = [each for each in of_kind(objects, kind) if re.match(name, each["metadata"]["name"])]
    change(each)
    return list(problems(objects, schemas()))


# By overlay, kind and name: where, what stands there by mistake, and what is said of it.
MISTAKES: dict[tuple[str, str, str], list[tuple[str, Any, str]]] = {
    (CPU, "Namespace", "apar"): [
        ("metadata/label", {}, "label"),
        ("metadata/name", "apar", "Namespace/apar: apar is not the RayService's namespace"),
    ],
    (CPU, "ServiceAccount", "apar"): [
        ("metadata/name", "apr", "no ServiceAccount apar"),
        ("automountServiceAccountTokn", False, "automountServiceAcc"),
    ],
    (CPU, "ConfigMap", "apar-environment"): [
        ("metadata/name", "other", "no ConfigMap apar-env"),
        ("data/RAY_SERVE_ENABLE_HA_PROXY", "0", "lacks RAY_"),
    ],
    (CPU, "ConfigMap", "dashboard-apar-forks"): [
        ("data/x", 1, "is not of type 'string'"),
    ],
    (CPU, "PodDisruptionBudget", "apar-engines"): [
        ("spec/minAvailable", "50%", "needs a number"),
        ("spec/minAvailable", 2, "keeps 2 of 1 pods"),
    ],
    (GPU, "PodDisruptionBudget", "apar-engines"): [
        ("spec/minAvailable", 2, "lets no node"),
    ],
    (CPU, "PodDisruptionBudget", "apar-head"): [
        ("spec/selector/matchLabels", {"a": "b"}, "selects no pod"),
    ],
    (CPU, "NetworkPolicy", "deny-by-default"): [
        ("spec/policyTypes", ["Ingress"], "none denies all"),
    ],
    (CPU, "NetworkPolicy", "ray"): [
        ("spec/egress", [], "cannot talk"),
        ("spec/podSelector/matchExpressions/0/values", ["had"], "selects no pod"),
    ],
    (CPU, "NetworkPolicy", "dns"): [
        ("spec/egress/0/ports", [{"port": 53}], "names over UDP"),
    ],
    (CPU, "NetworkPolicy", "clients"): [
        ("spec/ingress/0/ports/0/port", "http", "clients cannot reach"),
        ("spec/ingress/0/from", GONE, "every namespace reaches port serve"),
    ],
    (CPU, "NetworkPolicy", "operator"): [
        ("spec/ingress/0/ports", [{"port": "serve"}], "KubeRay cannot reach port dashboard"),
    ],
    (CPU, "NetworkPolicy", "metrics"): [
        ("spec/ingress/0/from/0", {"podSelector": {}}, "monitoring cannot reach"),
    ],
    (CPU, "NetworkPolicy", "redis"): [
        ("metadata/namespace", "default", "redis: default is not the RayService's namespace"),
        ("spec/podSelector", {"matchLabels": {"x": "y"}}, "cannot reach Redis"),
    ],
    (CPU, "NetworkPolicy", "head-to-redis"): [
        ("spec/egresses", [], "egresses"),
    ],
    (GPU, "NetworkPolicy", "model-download"): [
        ("spec/egress/0/ports/0/port", True, "is not valid"),
    ],
    (GPU, "PersistentVolumeClaim", "apar-models"): [
        ("metadata/name", "models", "no PersistentVolumeClaim"),
        ("metadata/namespace", GONE, "whatever namespace kubectl is set to"),
        ("spec/accessMode", ["x"], "accessMode"),
    ],
    (CPU, "PodMonitor", "apar-head"): [
        ("spec/podMetricsEndpoints/0/port", "metric", "has no port metric"),
        ("spec/podMetricsEndpoints/0/intervall", "15s", "intervall"),
    ],
    (CPU, "PodMonitor", "apar-engines"): [
        ("spec/selector/matchLabels", {"a": "b"}, "watched by 0 PodMonitors"),
    ],
    (CPU, "PrometheusRule", "apar"): [
        ("spec/groups/0/rules/0/exp", "up", "exp"),
        ("spec/groups/0/rules/0/expr", GONE, "'expr' is a required"),
        ("spec/groups/0/interval", "soon", "does not match"),
    ],
    (CPU, "Role", "prometheus"): [
        ("rules/0/verb", ["get"], "verb"),
    ],
    (CPU, "RoleBinding", "prometheus"): [
        ("roleRef/name", "prom", "no Role prom"),
        ("metadata/namespace", GONE, "whatever namespace kubectl is set to"),
    ],
    (CPU, "Service", "apar-redis"): [
        ("spec/selector", {"a": "b"}, "selects no pod"),
        ("spec/ports/0/targetPort", "rdis", "has no port rdis"),
        ("metadata/name", "redis", "no Service apar-redis"),
    ],
    (CPU, "StatefulSet", "apar-redis"): [
        ("spec/selector/matchLabels", {"a": "b"}, "selects no pod"),
        ("@container/image", "redis", "another image tomorrow"),
    ],
    (CPU, "RayService", "apar"): [
        ("spec/upgradeStrategi", {}, "upgradeStrategi"),
        (
            "spec/rayClusterConfig/gcsFaultToleranceOptions/redisPassword/valueFrom/secretKeyRef/name",
            "pw",
            "no Secret pw",
        ),
        ("spec/rayClusterDeletionDelaySeconds", 30, "ends before its requests"),
        ("spec/serveService/spec/ports/0/name", "http", "no port called serve"),
        ("spec/serveService/spec/ports/0/targetPort", 9000, "has no port 9000"),
        (
            "spec/rayClusterConfig/headGroupSpec/rayStartParams/metrics-export-port",
            "9090",
            "not Ray's metrics-export-port",
        ),
        (
            "spec/rayClusterConfig/workerGroupSpecs/0/rayStartParams/resources",
            GONE,
            "1 engines, and pods for 0",
        ),
        ("@engine/terminationGracePeriodSeconds", 60, "killed after 60 s"),
        ("@engine-container/lifecycle", GONE, "without emptying its Ray node"),
        ("@engine-container/lifecycle/preStop/exec/command/4", "300", "preStop takes 300 s"),
        ("@engine-container/envFrom", [], "lacks RAY_SERVE_ENABLE_HA_PROXY"),
        ("@head-container/env", [], "lacks POD_IP"),
        ("@head/volumes/1/secret/secretName", "keys", "no Secret keys"),
        ("@head-container/volumeMounts/1/mountPath", "/keys", "no Secret is mounted"),
        ("@head-container/volumeMounts/1/subPath", "keys.yaml", "through subPath"),
        ("@head/volumes/0/emptyDir", {}, "may fill the node's disk"),
        ("@head/volumes/0", {"name": "tmp", "hostPath": {"path": "/"}}, "folder of the node"),
        ("@head-container/volumeMounts", [], "no place to write to"),
        ("@head/securityContext/runAsNonRoot", False, "may run as root"),
        ("@head/securityContext/runAsUser", 0, "runs as user 0"),
        ("@head/securityContext/seccompProfile", GONE, "no seccomp profile"),
        ("@head/automountServiceAccountToken", True, "mounts a service account's"),
        ("@head/hostNetwork", True, "belongs to the node"),
        ("@head-container/securityContext/readOnlyRootFilesystem", False, "may write to its root"),
        ("@head-container/securityContext/capabilities", GONE, "keeps capabilities"),
        ("@head-container/securityContext/allowPrivilegeEscalation", True, "more rights"),
        ("@head-container/securityContext/privileged", True, "is privileged"),
        ("@head-container/resources/limits/memory", GONE, "limits: lacks memory"),
        ("@head-container/image", "apar-serve:latest", "another image tomorrow"),
        ("@head-container/livenessProbe", GONE, "has no livenessProbe"),
        ("@engine-container/readinessProbe/httpGet/port", "http", "no port is called http"),
        ("@engine-container/readinesProbe", {}, "readinesProbe"),
        ("@engine-container/imagePullPolicy", ["Always"], "is not of type 'string'"),
    ],
    (GPU, "RayService", "apar"): [
        ("spec/rayClusterConfig/workerGroupSpecs/0/replicas", 1, "take 2 GPUs, and pods have 1"),
    ],
}
EACH = [(*where, *mistake) for where, mistakes in MISTAKES.items() for mistake in mistakes]
IN_THE_APPLICATION: list[tuple[str, Any, str]] = [
    ("http_options/host", "127.0.0.1", "others cannot reach 127.0.0.1"),
    ("http_options/port", 9000, "port serve is not http_options.port"),
    ("http_options/ports", 8000, "http_options.ports: Ray Serve knows no such field"),
    ("proxy_location", "HeadOnly", "EveryNode is needed"),
    (
        "applications/0/import_path",
        "deployments.app.kuberay:app",
        "deployments.app.kuberay:application",
    ),
    ("applications/0/route_prefix", "/apar", "begin at /"),
    ("applications/0/arg", {}, "arg: Ray Serve knows no such field"),
    ("applications/0/deployments/0/replicas", 2, "replicas: Ray Serve knows no such field"),
    ("applications/0/args/devise", "cpu", "args.devise"),
    ("applications/0/args/device", "gpu", "take 1 GPUs, and pods have 0"),
    ("applications/0/args/engine_resource", GONE, "engines may start on the head"),
    ("applications/0/args/cluster/keys_file", GONE, "requests need API keys"),
    ("applications/0/args/cluster/keys_file", "/etc/keys.yaml", "no Secret is mounted"),
    ("applications/0/args/cluster/drain_s", 600, "draining may take 600 s"),
    (
        "applications/0/args/cluster/limits",
        {"cache_secret": {"env": "CACHE_SECRET"}},
        "limits.cache_secret is read from CACHE_SECRET, which the pod does not have",
    ),
    (
        "applications/0/args/cluster/tracing",
        {"endpoint": "http://collector.observability.svc.cluster.local:4318"},
        "lets it reach tracing.endpoint, collector.observability",
    ),
    (
        "applications/0/args/cluster/limits",
        {"rate_storage": "redis://redis.redis:6379"},
        "lets it reach limits.rate_storage, redis.redis",
    ),
    ("applications/0/args/cluster/models/0/cpu_threads", 64, "more than the cores"),
    ("applications/0/args/cluster/models/0/replicas", 3, "3 engines, and pods for 1"),
    ("applications/0/deployments/0/name", "Gatway", "Gatway is none of Gateway, Replica"),
    ("applications/0/deployments/0/user_config/limts", {}, "user_config: limts"),
]


@pytest.mark.parametrize(
    ("overlay", "kind", "name", "path", "value", "said"),
    EACH,
    ids=[f"{kind}-{path}-{number}" for number, (_, kind, _, path, _, _) in enumerate(EACH)],
)
def test_a_mistake_is_found(
    overlay: str, kind: str, name: str, path: str, value: Any, said: str
) -> None:
    found = found_with(overlay, kind, name, lambda each: put(each, path, value))

    assert any(said in each for each in found), found


@pytest.mark.parametrize(("path", "value", "said"), IN_THE_APPLICATION)
def test_a_mistake_in_the_application_is_found(path: str, value: Any, said: str) -> None:
    def change(service: Object) -> None:
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        put(config, path, value)
        service["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    found = found_with(CPU, "RayService", "apar", change)

    assert any(said in each for each in found), found


def test_every_kind_that_is_deployed_has_a_mistake_here() -> None:
    kinds = {each["kind"] for overlay in (CPU, GPU) for each in objects_of(overlay)}

    assert kinds == {kind for _, kind, _ in MISTAKES}
