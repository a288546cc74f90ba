"""Whether objects fit together: names that are referred to, labels that are selected, ports."""

from collections.abc import Iterator

from k8s.objects import Object, Pod, example_secrets, label_of, matches, of_kind, pods

_OF_NO_NAMESPACE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "PersistentVolume",
    "PriorityClass",
    "RuntimeClass",
    "StorageClass",
}


def problems(objects: list[Object]) -> Iterator[str]:
    """What refers to nothing."""
    yield from _namespaces(objects)
    yield from _names(objects)
    yield from _selectors(objects)
    yield from _monitors(objects)
    yield from _services(objects)
    yield from _budgets(objects)


def _namespaces(objects: list[Object]) -> Iterator[str]:
    """What does not lie beside the RayService, as all other checks take for granted."""
    services = of_kind(objects, "RayService")
    home = services[0]["metadata"].get("namespace") if services else None
    for each in objects:
        if each["kind"] in _OF_NO_NAMESPACE:
            continue
        place = each["metadata"].get("name" if each["kind"] == "Namespace" else "namespace")
        if place is None:
            yield f"{label_of(each)}: goes to whatever namespace kubectl is set to"
        elif place != home:
            yield f"{label_of(each)}: {place} is not the RayService's namespace"


def _names(objects: list[Object]) -> Iterator[str]:
    known = {(each["kind"], each["metadata"]["name"]) for each in [*objects, *example_secrets()]}
    for pod in pods(objects):
        for reference in _references(pod):
            if reference not in known:
                yield f"{pod.owner}: there is no {reference[0]} {reference[1]}"
    for each in of_kind(objects, "RayService"):
        redis = each["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
        secret = redis.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef")
        if secret and ("Secret", secret["name"]) not in known:
            yield f"{label_of(each)}: there is no Secret {secret['name']}"
        host = redis.get("redisAddress", "").removeprefix("redis://").partition(":")[0]
        if host and "." not in host and ("Service", host) not in known:
            yield f"{label_of(each)}: there is no Service {host}"
    for each in of_kind(objects, "RoleBinding"):
        if (each["roleRef"]["kind"], each["roleRef"]["name"]) not in known:
            yield f"{label_of(each)}: there is no Role {each['roleRef']['name']}"


def _references(pod: Pod) -> Iterator[tuple[str, str]]:
    if name := pod.spec.get("serviceAccountName"):
        yield "ServiceAccount", name
    for volume in pod.spec.get("volumes", []):
        if secret := volume.get("secret"):
            yield "Secret", secret["secretName"]
        if config_map := volume.get("configMap"):
            yield "ConfigMap", config_map["name"]
        if claim := volume.get("persistentVolumeClaim"):
            yield "PersistentVolumeClaim", claim["claimName"]
    for source in pod.container.get("envFrom", []):
        for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            if key in source:
                yield kind, source[key]["name"]
    for variable in pod.container.get("env", []):
        source = variable.get("valueFrom", {})
        for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            if key in source:
                yield kind, source[key]["name"]


def _selected(objects: list[Object], selector: Object) -> list[Pod]:
    return [pod for pod in pods(objects) if matches(selector, pod.labels)]


def _selectors(objects: list[Object]) -> Iterator[str]:
    for each in objects:
        spec = each.get("spec", {})
        selector = {
            "PodDisruptionBudget": spec.get("selector"),
            "PodMonitor": spec.get("selector"),
            "StatefulSet": spec.get("selector"),
            "NetworkPolicy": spec.get("podSelector"),
            "Service": {"matchLabels": spec.get("selector", {})},
        }.get(each["kind"])
        if selector is not None and not _selected(objects, selector):
            yield f"{label_of(each)}: selects no pod"


def _monitors(objects: list[Object]) -> Iterator[str]:
    watched: list[str] = []
    for each in of_kind(objects, "PodMonitor"):
        for pod in _selected(objects, each["spec"]["selector"]):
            watched.append(pod.owner)
            for endpoint in each["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] not in pod.ports:
                    yield f"{label_of(each)}: {pod.owner} has no port {endpoint['port']}"
    if not watched:
        return
    for pod in pods(objects):
        if pod.ray_start is None:
            continue
        if watched.count(pod.owner) != 1:
            yield f"{pod.owner}: is watched by {watched.count(pod.owner)} PodMonitors"
        if pod.ray_start.get("metrics-export-port") != str(pod.ports.get("metrics")):
            yield f"{pod.owner}: its port metrics is not Ray's metrics-export-port"


def _services(objects: list[Object]) -> Iterator[str]:
    for each in of_kind(objects, "Service"):
        for pod in _selected(objects, {"matchLabels": each["spec"]["selector"]}):
            yield from _targets(label_of(each), each["spec"]["ports"], pod)
    for each in of_kind(objects, "RayService"):
        ports = each["spec"].get("serveService", {}).get("spec", {}).get("ports", [])
        if "serve" not in [port["name"] for port in ports]:
            yield f"{label_of(each)}: its Service has no port called serve, which KubeRay asks for"
        for pod in pods([each]):
            yield from _targets(label_of(each), ports, pod)


def _targets(label: str, ports: list[Object], pod: Pod) -> Iterator[str]:
    for port in ports:
        target = port.get("targetPort", port["port"])
        known = pod.ports.values() if isinstance(target, int) else pod.ports
        if target not in known:
            yield f"{label}: {pod.owner} has no port {target}"


def _budgets(objects: list[Object]) -> Iterator[str]:
    for each in of_kind(objects, "PodDisruptionBudget"):
        least = each["spec"].get("minAvailable")
        if not isinstance(least, int):
            # Pods of a RayCluster have no controller that Kubernetes could ask for their number.
            yield f"{label_of(each)}: needs a number as minAvailable"
            continue
        count = sum(pod.count for pod in _selected(objects, each["spec"]["selector"]))
        if least > count:
            yield f"{label_of(each)}: keeps {least} of {count} pods"
        if least == count and count > 1:
            yield f"{label_of(each)}: lets no node with one of {count} pods be drained"
