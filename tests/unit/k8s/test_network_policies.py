"""Network policies, evaluated for each pair of pods: what is needed is open, the rest is closed."""

import pytest

from tests.fakes.overlays import (
    NEEDS_KUBECTL,
    OVERLAYS,
    Object,
    Pod,
    matches,
    objects_of,
    of_kind,
    pods,
    ray_pods,
)

Labels = dict[str, str]
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
OPERATOR = {"kubernetes.io/metadata.name": "kuberay-system"}
OPERATOR_POD = {"app.kubernetes.io/component": "kuberay-operator"}
DNS = {"kubernetes.io/metadata.name": "kube-system"}
DNS_POD = {"k8s-app": "kube-dns"}
CLIENT = {"apar-serve/client": "true"}
STRANGER = {"kubernetes.io/metadata.name": "elsewhere"}

pytestmark = NEEDS_KUBECTL
EVERY = pytest.mark.parametrize("overlay", OVERLAYS)


def opens(
    objects: list[Object],
    direction: str,
    pod: Pod,
    namespace: Labels | None,
    labels: Labels,
    port: int | str,
    protocol: str = "TCP",
) -> bool:
    """Whether a policy opens a pod's port.

    `direction` is "ingress" or "egress". The peer has these labels, in a namespace with these
    labels or, for None, in the pod's own.
    """
    ports = {port, pod.ports.get(str(port), port)} if direction == "ingress" else {port}
    return any(
        _is_peer(peer, namespace, labels) and _has_port(rule, ports, protocol)
        for policy in of_kind(objects, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(direction, [])
        for peer in rule["from" if direction == "ingress" else "to"]
    )


def _is_peer(peer: Object, namespace: Labels | None, labels: Labels) -> bool:
    if "ipBlock" in peer:
        return False  # The only open blocks are public addresses.
    if "namespaceSelector" in peer:
        in_namespace = namespace is not None and matches(peer["namespaceSelector"], namespace)
    else:
        in_namespace = namespace is None
    return in_namespace and matches(peer.get("podSelector", {}), labels)


def _has_port(rule: Object, ports: set[int | str], protocol: str) -> bool:
    return "ports" not in rule or any(
        each["port"] in ports and each["protocol"] == protocol for each in rule["ports"]
    )


@EVERY
def test_everything_is_denied_by_default(overlay: str) -> None:
    specs = [each["spec"] for each in of_kind(objects_of(overlay), "NetworkPolicy")]

    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in specs


@EVERY
def test_other_namespaces_reach_no_port(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in pods(objects):
        for name in pod.ports:
            assert not opens(objects, "ingress", pod, STRANGER, {}, name), (pod.owner, name)


@EVERY
def test_every_pod_resolves_names(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in pods(objects):
        for protocol in ("UDP", "TCP"):
            assert opens(objects, "egress", pod, DNS, DNS_POD, 53, protocol), pod.owner


@EVERY
def test_rays_pods_reach_each_other_on_any_port(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in ray_pods(objects):
        for other in ray_pods(objects):
            assert opens(objects, "ingress", pod, None, other.labels, 23456)
            assert opens(objects, "egress", pod, None, other.labels, 23456)


@EVERY
def test_prometheus_reads_the_metrics(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in ray_pods(objects):
        for port in ("ray-metrics",) if pod.is_head else ("ray-metrics", "metrics"):
            assert opens(objects, "ingress", pod, MONITORING, {}, port), (pod.owner, port)


@EVERY
def test_kuberay_reaches_the_head_and_clients_reach_the_engines(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in ray_pods(objects):
        for port in ("dashboard", "serve"):
            open_to_kuberay = opens(objects, "ingress", pod, OPERATOR, OPERATOR_POD, port)
            assert open_to_kuberay == pod.is_head, (pod.owner, port)
        assert not opens(objects, "ingress", pod, OPERATOR, {}, "dashboard")
        assert opens(objects, "ingress", pod, CLIENT, {}, "serve") != pod.is_head


def test_only_the_head_reaches_redis() -> None:
    objects = objects_of("head-fault-tolerance")
    [redis] = [pod for pod in pods(objects) if "redis" in pod.ports]
    for pod in ray_pods(objects):
        assert opens(objects, "ingress", redis, None, pod.labels, "redis") == pod.is_head
        assert opens(objects, "egress", pod, None, redis.labels, "redis") == pod.is_head
