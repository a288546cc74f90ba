"""The objects of an overlay, as `kubectl apply -k` would send them, and the pods that they make."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
OVERLAYS = tuple(sorted(path.name for path in (FOLDER / "overlays").iterdir() if path.is_dir()))

Object = dict[str, Any]


class BuildError(RuntimeError):
    """Kustomize cannot build the folder; its message says why."""


@dataclass(frozen=True)
class Pod:
    """A pod template: who makes pods of it, how many, and their labels and specification."""

    owner: str
    count: int
    labels: dict[str, str]
    spec: Object
    ray_start: dict[str, str] | None = None

    @property
    def container(self) -> Object:
        """The container that matters; none of our pods has another."""
        container: Object = self.spec["containers"][0]
        return container

    @property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


def build(folder: Path) -> list[Object]:
    """What kustomize makes of a folder; raises BuildError."""
    if shutil.which("kubectl") is None:
        raise BuildError("kubectl is not installed")
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    if made.returncode:
        raise BuildError(made.stderr.strip())
    return [each for each in yaml.safe_load_all(made.stdout) if each]


def example_secrets() -> list[Object]:
    """The Secrets that people make themselves, as their examples."""
    files = sorted((FOLDER / "secrets").glob("*.example.yaml"))
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    """Objects of one kind."""
    return [each for each in objects if each["kind"] == kind]


def label_of(each: Object) -> str:
    """How an object is called in messages."""
    return f"{each['kind']}/{each['metadata']['name']}"


def pods(objects: Iterable[Object]) -> Iterator[Pod]:
    """Every pod template of the objects."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            yield _pod(f"{label_of(each)} head", 1, cluster["headGroupSpec"])
            for group in cluster.get("workerGroupSpecs", []):
                yield _pod(f"{label_of(each)} {group['groupName']}", group["replicas"], group)
        elif each["kind"] in ("StatefulSet", "Deployment"):
            yield _pod(label_of(each), spec.get("replicas", 1), spec)


def _pod(owner: str, count: int, spec: Object) -> Pod:
    template = spec["template"]
    return Pod(
        owner,
        count,
        template["metadata"].get("labels", {}),
        template["spec"],
        spec.get("rayStartParams"),
    )


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes takes these labels."""
    pairs = selector.get("matchLabels", {}).items() <= labels.items()
    return pairs and all(_holds(each, labels) for each in selector.get("matchExpressions", []))


def _holds(expression: Object, labels: dict[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator: {expression['operator']}")
