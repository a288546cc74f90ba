"""Network policies, evaluated for each pair of pods: what is needed is open, the rest is closed."""

from ipaddress import ip_address, ip_network

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
OPENSHIFT_DNS = {"kubernetes.io/metadata.name": "openshift-dns"}
OPENSHIFT_DNS_POD = {"dns.operator.openshift.io/daemonset-dns": "default"}
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
    address: str | None = None,
) -> bool:
    """Whether a policy opens a pod's port.

    `direction` is "ingress" or "egress". The peer has these labels, in a namespace with these
    labels or, for None, in the pod's own; or it is no pod and has an address.
    """
    ports = {port, pod.ports.get(str(port), port)} if direction == "ingress" else {port}
    # A rule without peers is for all.
    everybody: list[Object | None] = [None]
    return any(
        _is_peer(peer, namespace, labels, address) and _has_port(rule, ports, protocol)
        for policy in of_kind(objects, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(direction, [])
        for peer in rule.get("from" if direction == "ingress" else "to", everybody)
    )


def _is_peer(
    peer: Object | None, namespace: Labels | None, labels: Labels, address: str | None
) -> bool:
    if peer is None:
        return True
    if (block := peer.get("ipBlock")) or address is not None:
        # Pods have addresses in private networks, which no block contains.
        return bool(
            block
            and address
            and ip_address(address) in ip_network(block["cidr"])
            and not any(ip_address(address) in ip_network(each) for each in block.get("except", []))
        )
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
            assert opens(objects, "egress", pod, OPENSHIFT_DNS, OPENSHIFT_DNS_POD, 5353, protocol)
            node_local = opens(
                objects, "egress", pod, None, {}, 53, protocol, address="169.254.20.10"
            )
            assert node_local, pod.owner


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


@pytest.mark.parametrize("overlay", ["head-fault-tolerance", "gpu-everything"])
def test_only_the_head_reaches_redis(overlay: str) -> None:
    objects = objects_of(overlay)
    [redis] = [pod for pod in pods(objects) if "redis" in pod.ports]
    for pod in ray_pods(objects):
        assert opens(objects, "ingress", redis, None, pod.labels, "redis") == pod.is_head
        assert opens(objects, "egress", pod, None, redis.labels, "redis") == pod.is_head


@EVERY
def test_only_the_pod_that_downloads_weights_reaches_the_internet(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in pods(objects):
        names = [variable["name"] for each in pod.containers for variable in each.get("env", [])]
        downloads = "HF_TOKEN" in names
        for address in ("93.184.216.34", "2606:4700::1111"):
            opened = opens(objects, "egress", pod, None, {}, 443, address=address)
            # The autoscaler needs an address that differs between clusters.
            assert opened == (downloads or _autoscales(objects, pod)), pod.owner
            assert not opens(objects, "egress", pod, None, {}, 80, address=address)
        for address in ("10.0.0.1", "169.254.169.254", "192.168.1.1", "fd00::1"):
            opened = opens(objects, "egress", pod, None, {}, 443, address=address)
            assert opened == _autoscales(objects, pod)


@EVERY
def test_the_autoscaler_reaches_the_kubernetes_api(overlay: str) -> None:
    objects = objects_of(overlay)
    for pod in pods(objects):
        for port in (443, 6443):
            opened = opens(objects, "egress", pod, None, {}, port, address="10.96.0.1")
            assert opened == _autoscales(objects, pod), pod.owner


def _autoscales(objects: list[Object], pod: Pod) -> bool:
    [service] = of_kind(objects, "RayService")
    enabled = service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling", False)
    return bool(enabled and pod.is_head)
