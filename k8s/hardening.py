"""What every pod must have so that a mistake in it, or a break-in, stays in it."""

from collections.abc import Iterator

from k8s.objects import Object, Pod, pods

_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def problems(objects: list[Object]) -> Iterator[str]:
    """What each pod lacks."""
    for pod in pods(objects):
        for problem in (
            *_identity(pod),
            *_file_systems(pod),
            *_container(pod),
            *_probes(pod),
        ):
            yield f"{pod.owner}: {problem}"


def _identity(pod: Pod) -> Iterator[str]:
    context = pod.spec.get("securityContext", {})
    if not context.get("runAsNonRoot"):
        yield "may run as root"
    if context.get("runAsUser", 0) == 0:
        yield "runs as user 0"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "mounts a service account's token"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(name):
            yield f"{name}: shares what belongs to the node"


def _file_systems(pod: Pod) -> Iterator[str]:
    if not pod.container.get("securityContext", {}).get("readOnlyRootFilesystem"):
        yield "may write to its root file system"
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    # A StatefulSet adds a volume for each claim of its own.
    mounts = {mount["mountPath"]: mount for mount in pod.container.get("volumeMounts", [])}
    if "/tmp" not in mounts:
        yield "has no place to write to: /tmp"
    for path, mount in mounts.items():
        volume = volumes.get(mount["name"], {})
        if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {}):
            yield f"{path}: may fill the node's disk"
        if "hostPath" in volume:
            yield f"{path}: is a folder of the node"
        if "secret" in volume and "subPath" in mount:
            yield f"{path}: a changed Secret does not reach a running pod through subPath"


def _container(pod: Pod) -> Iterator[str]:
    context = pod.container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield "may get more rights than it was started with"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"
    if context.get("privileged"):
        yield "is privileged"
    resources = pod.container.get("resources", {})
    for bound in ("requests", "limits"):
        missing = [name for name in _RESOURCES if name not in resources.get(bound, {})]
        if missing:
            yield f"resources.{bound}: lacks {', '.join(missing)}"
    _, _, tag = pod.container["image"].rpartition("/")[2].partition(":")
    if tag in ("", "latest"):
        yield f"{pod.container['image']}: is another image tomorrow"


def _probes(pod: Pod) -> Iterator[str]:
    for name in ("livenessProbe", "readinessProbe"):
        probe = pod.container.get(name)
        if probe is None:
            yield f"has no {name}"
            continue
        port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
        if isinstance(port, str) and port not in pod.ports:
            yield f"{name}: no port is called {port}"
