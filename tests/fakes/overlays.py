"""Objects of the Kubernetes overlays, as `kubectl apply -k` would send them, and their pods."""

import copy
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.tools import needs

K8S = Path(__file__).parents[2] / "k8s"
_OPTIONAL = ("monitoring", "autoscaling", "tracing", "rate-storage")
# An overlay, the components that are added to it, and those that are removed.
_VARIANTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "local": ("local", (), ()),
    "local-everything": ("local", _OPTIONAL, ()),
    "head-fault-tolerance": ("head-fault-tolerance", (), ()),
    "gpu": ("gpu", (), ()),
    "gpu-everything": (
        "gpu", (*_OPTIONAL, "head-fault-tolerance", "weights-shared"), ("weights-per-pod",)
    ),
}  # fmt: skip
OVERLAYS = tuple(_VARIANTS)
STORAGE_CLASS = "shared-files"
"""A class with ReadWriteMany, which `weights-shared` needs."""
NEEDS_KUBECTL = needs("kubectl")

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """Pod template with its owner and number of replicas; `ray_start` only for Ray's pods."""

    owner: str
    count: int
    labels: dict[str, str]
    spec: Object
    ray_start: dict[str, str] | None = None

    @property
    def container(self) -> Object:
        """The only container."""
        [container] = self.spec["containers"]
        return dict(container)

    @property
    def containers(self) -> list[Object]:
        """The containers, the ones that run before them included."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    @property
    def is_head(self) -> bool:
        """Whether this is the Ray head."""
        return self.owner.endswith(" head")


def build(folder: Path) -> list[Object]:
    """Build a kustomization with kubectl."""
    command = ["kubectl", "kustomize", str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return [each for each in yaml.safe_load_all(built.stdout) if each]


def objects_of(overlay: str) -> list[Object]:
    """Objects of an overlay; the caller may change them."""
    return copy.deepcopy(_built(overlay))


@functools.cache
def _built(overlay: str) -> list[Object]:
    name, added, removed = _VARIANTS[overlay]
    if not added:
        return build(K8S / "overlays" / name)
    return variant(name, added, removed, {"storage-class": STORAGE_CLASS})


def variant(
    overlay: str,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    parameters: dict[str, str] | None = None,
    serve: str | None = None,
) -> list[Object]:
    """Build a copy of an overlay, as the guide tells users to make one.

    `added` and `removed` are components; `parameters` and `serve` replace values in parameters.env
    and the text of serve.yaml.
    """
    source = K8S / "overlays" / overlay
    values = yaml.safe_load((source / "kustomization.yaml").read_text(encoding="utf-8"))
    kept = [each for each in values["components"] if Path(each).name not in removed]
    values["components"] = kept + [f"../../components/{each}" for each in added]
    lines = dict(
        line.split("=", 1)
        for line in (source / "parameters.env").read_text(encoding="utf-8").splitlines()
        if "=" in line and not line.startswith("#")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # kustomize takes relative paths only.
        for key in ("resources", "components"):
            values[key] = [os.path.relpath(source / each, folder) for each in values[key]]
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(values))
        pairs = (lines | (parameters or {})).items()
        (folder / "parameters.env").write_text("".join(f"{key}={value}\n" for key, value in pairs))
        (folder / "serve.yaml").write_text(serve or (source / "serve.yaml").read_text())
        return build(folder)


def example_secrets() -> list[Object]:
    """Examples of the Secrets that users create themselves."""
    files = sorted((K8S / "secrets").glob("*.example.yaml"))
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    """Objects of one kind."""
    return [each for each in objects if each["kind"] == kind]


def label_of(each: Object) -> str:
    """Kind and name of an object."""
    return f"{each['kind']}/{each['metadata']['name']}"


def serve_config(service: Object) -> dict[str, Any]:
    """`serveConfigV2` of a RayService."""
    return dict(yaml.safe_load(service["spec"]["serveConfigV2"]))


def pods(objects: Iterable[Object]) -> Iterator[Pod]:
    """Every pod template of the objects."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            yield _pod(f"{label_of(each)} head", 1, cluster["headGroupSpec"])
            for group in cluster.get("workerGroupSpecs", []):
                yield _pod(f"{label_of(each)} {group['groupName']}", group["replicas"], group)
        elif each["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield _pod(label_of(each), spec.get("replicas", 1), spec)


def ray_pods(objects: Iterable[Object]) -> list[Pod]:
    """Templates of the head and the engines."""
    return [pod for pod in pods(objects) if pod.ray_start is not None]


def _pod(owner: str, count: int, spec: Object) -> Pod:
    template = spec["template"]
    labels = template["metadata"].get("labels", {})
    return Pod(owner, count, labels, template["spec"], spec.get("rayStartParams"))


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes selects these labels."""
    pairs = selector.get("matchLabels", {}).items() <= labels.items()
    return pairs and all(_holds(each, labels) for each in selector.get("matchExpressions", []))


def _holds(expression: Object, labels: dict[str, str]) -> bool:
    # No other operator is in use.
    assert expression["operator"] == "In"
    return labels.get(expression["key"]) in expression["values"]
