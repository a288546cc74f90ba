"""Whether the network policies let through what is needed, and nothing from elsewhere."""

from collections.abc import Iterator

from k8s.objects import Object, Pod, matches, of_kind, pods

MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
OPERATOR = {"kubernetes.io/metadata.name": "kuberay-system"}
OPERATOR_POD = {"app.kubernetes.io/component": "kuberay-operator"}
DNS = {"kubernetes.io/metadata.name": "kube-system"}
DNS_POD = {"k8s-app": "kube-dns"}
CLIENT = {"apar-serve/client": "true"}
STRANGER = {"kubernetes.io/metadata.name": "elsewhere"}


def problems(objects: list[Object]) -> Iterator[str]:
    """What is closed and must be open, and the other way round."""
    policies = of_kind(objects, "NetworkPolicy")
    everyone = list(pods(objects))
    ray = [pod for pod in everyone if pod.ray_start is not None]
    if not any(
        policy["spec"]["podSelector"] == {}
        and set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        and not policy["spec"].get("ingress")
        and not policy["spec"].get("egress")
        for policy in policies
    ):
        yield "NetworkPolicy: none denies all by default"
    for pod in ray:
        yield from _of_ray_pod(policies, pod, ray)
    for pod in everyone:
        for protocol in ("UDP", "TCP"):
            if not lets_out(policies, pod, DNS, DNS_POD, 53, protocol):
                yield f"NetworkPolicy: {pod.owner} cannot ask for names over {protocol}"
        for name, number in pod.ports.items():
            if _lets_in(policies, pod, STRANGER, {}, name, number):
                yield f"NetworkPolicy: every namespace reaches port {name} of {pod.owner}"
    yield from _of_redis(policies, everyone)


def _of_ray_pod(policies: list[Object], pod: Pod, ray: list[Pod]) -> Iterator[str]:
    is_head = "head" in pod.owner
    wanted: list[tuple[str, dict[str, str], dict[str, str], str]] = [
        ("monitoring", MONITORING, {}, "metrics")
    ]
    if is_head:
        wanted += [("KubeRay", OPERATOR, OPERATOR_POD, name) for name in ("dashboard", "serve")]
    else:
        wanted += [("clients", CLIENT, {}, "serve")]
        if _lets_in(policies, pod, OPERATOR, {}, "dashboard", 8265):
            yield f"NetworkPolicy: any pod beside KubeRay reaches {pod.owner}"
    for who, namespace, labels, name in wanted:
        if not _lets_in(policies, pod, namespace, labels, name, pod.ports.get(name, 0)):
            yield f"NetworkPolicy: {who} cannot reach port {name} of {pod.owner}"
    for other in ray:
        # Any port, as Ray chooses most of them.
        if not (
            _lets_in(policies, pod, None, other.labels, "", 23456)
            and lets_out(policies, pod, None, other.labels, 23456, "TCP")
        ):
            yield f"NetworkPolicy: {pod.owner} and {other.owner} cannot talk"


def _of_redis(policies: list[Object], everyone: list[Pod]) -> Iterator[str]:
    for redis in everyone:
        if "redis" not in redis.ports:
            continue
        for pod in everyone:
            if pod.ray_start is None:
                continue
            reaches = _lets_in(
                policies, redis, None, pod.labels, "redis", redis.ports["redis"]
            ) and lets_out(policies, pod, None, redis.labels, "redis", "TCP")
            if reaches != ("head" in pod.owner):
                yield f"NetworkPolicy: {pod.owner} {'' if reaches else 'cannot '}reach Redis"


def _lets_in(
    policies: list[Object],
    pod: Pod,
    namespace: dict[str, str] | None,
    labels: dict[str, str],
    name: str,
    number: int,
) -> bool:
    """Whether a pod of these labels, in a namespace of those (None: this one), gets in."""
    return any(
        _peer(peer, namespace, labels) and _port(rule, (name, number), "TCP")
        for policy in policies
        if matches(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get("ingress", [])
        for peer in rule.get("from", [{"namespaceSelector": {}}])
    )


def lets_out(
    policies: list[Object],
    pod: Pod,
    namespace: dict[str, str] | None,
    labels: dict[str, str],
    port: int | str,
    protocol: str,
) -> bool:
    """Whether a pod gets out to one of these labels, in a namespace of those (None: its own)."""
    return any(
        _peer(peer, namespace, labels) and _port(rule, (port,), protocol)
        for policy in policies
        if matches(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get("egress", [])
        for peer in rule.get("to", [{"namespaceSelector": {}}])
    )


def _peer(peer: Object, namespace: dict[str, str] | None, labels: dict[str, str]) -> bool:
    if "ipBlock" in peer:
        return False  # Addresses of pods are not in the blocks that we open.
    if "namespaceSelector" in peer:
        if namespace is None or not matches(peer["namespaceSelector"], namespace):
            return False
    elif namespace is not None:
        return False
    return matches(peer.get("podSelector", {}), labels)


def _port(rule: Object, wanted: tuple[int | str, ...], protocol: str) -> bool:
    ports = rule.get("ports")
    return ports is None or any(
        port.get("port") in (*wanted, None) and port.get("protocol", "TCP") == protocol
        for port in ports
    )
