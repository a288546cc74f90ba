"""Objects are valid by the schemas of Kubernetes and of the custom resources.

An API server silently drops unknown fields; here they are errors.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.fakes.overlays import (
    K8S,
    NEEDS_KUBECTL,
    OVERLAYS,
    STORAGE_CLASS,
    Object,
    label_of,
    objects_of,
    of_kind,
    pods,
)

# `GROUP_KINDs.yaml` of KubeRay, prometheus-operator and the Gateway API, not in this repository.
CRDS = Path(os.environ.get("APAR_CRDS") or Path(__file__).parents[4] / "shared" / "crds")
KUBERNETES = "1.33"
FOLDER = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
KEPT = {"type", "enum", "pattern", "required", "minimum", "maximum", "minLength", "maxLength"}
KEPT |= {"minItems", "maxItems", "minProperties", "maxProperties", "allOf", "anyOf", "oneOf"}

pytestmark = [
    NEEDS_KUBECTL,
    pytest.mark.skipif(not CRDS.is_dir(), reason=f"no custom resource definitions in {CRDS}"),
]


def violations(objects: list[Object]) -> list[str]:
    """Schema violations of all objects, their metadata and their pods."""
    return [
        f"{label}: {'.'.join(map(str, error.path))}: {error.message}"
        for label, validator, value in _parts(objects)
        for error in validator.iter_errors(value)
    ]


def _parts(objects: list[Object]) -> Iterator[tuple[str, Draft202012Validator, Object]]:
    """Label, schema and value of everything to validate."""
    for each in objects:
        custom = _custom(each["apiVersion"], each["kind"])
        if custom is None:
            yield label_of(each), _builtin(each["kind"], each["apiVersion"]), each
            continue
        yield label_of(each), custom, each
        # Custom resource definitions leave metadata open; a ConfigMap has the same metadata.
        as_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": each["metadata"]}
        yield label_of(each), _builtin("ConfigMap", "v1"), as_map
    # Custom resource definitions check the names of a pod's fields, but few of their values.
    for pod in pods(objects):
        metadata = {"name": "pod", "labels": pod.labels}
        as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}
        yield pod.owner, _builtin("Pod", "v1"), as_pod


@functools.cache
def _builtin(kind: str, api_version: str) -> Draft202012Validator:
    """Like `kubernetes_validate.validate(..., strict=True)`, which rereads its files each time."""
    group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    schema = schema_contents(f"{FOLDER}/{name}.json", KUBERNETES)
    definitions = schema_contents(f"{FOLDER}/_definitions.json", KUBERNETES)
    registry: Registry[Any] = Registry()
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ registry)
    return Draft202012Validator(schema, registry=registry)


@functools.cache
def _custom(api_version: str, kind: str) -> Draft202012Validator | None:
    group, _, wanted = api_version.rpartition("/")
    file = CRDS / f"{group}_{kind.lower()}s.yaml"
    if not file.is_file():
        return None
    # The files are large, and the loader in C reads them ten times faster.
    spec = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)["spec"]
    [schema] = [
        version["schema"]["openAPIV3Schema"]
        for version in spec["versions"]
        if version["name"] == wanted
    ]
    return Draft202012Validator(_strict(schema, is_root=True))


def _strict(schema: Object, *, is_root: bool = False) -> Object:
    """Convert a structural schema to a JSON schema that refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {key: value for key, value in schema.items() if key in KEPT}
    if schema.get("nullable"):
        strict["type"] = [schema["type"], "null"]
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    if schema.get("type") != "object":
        return strict
    fields = schema.get("properties", {}).items()
    properties: dict[str, Any] = {name: _strict(each) for name, each in fields}
    if is_root or schema.get("x-kubernetes-embedded-resource"):
        properties |= dict.fromkeys(("apiVersion", "kind", "metadata"), True)
    preserved = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    rest = schema.get("additionalProperties", preserved)
    if isinstance(rest, dict):
        rest = _strict(rest)
    return strict | {"properties": properties, "additionalProperties": rest}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid(overlay: str) -> None:
    assert violations(objects_of(overlay)) == []


def test_the_examples_are_valid_and_lead_to_the_service() -> None:
    files = (K8S / "examples").glob("*.yaml")
    examples = {each["kind"]: each for each in map(yaml.safe_load, map(Path.read_text, files))}
    [service] = of_kind(objects_of("local"), "RayService")
    target = service["spec"]["serveService"]
    [port] = target["spec"]["ports"]
    route = examples.pop("HTTPRoute")["spec"]["rules"][0]
    [rule] = examples["Ingress"]["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]

    assert violations(list(examples.values())) == []
    assert route["backendRefs"] == [{"name": target["metadata"]["name"], "port": port["port"]}]
    assert backend == {"name": target["metadata"]["name"], "port": {"number": port["port"]}}
    claims = of_kind(objects_of("gpu-everything"), "PersistentVolumeClaim")
    assert {claim["spec"]["storageClassName"] for claim in claims} == {STORAGE_CLASS}
    assert examples["StorageClass"]["metadata"]["name"] == STORAGE_CLASS


def test_an_overlay_as_it_is_takes_the_clusters_own_storage_class() -> None:
    for overlay in ("local", "gpu"):
        assert "storageClassName" not in yaml.safe_dump(objects_of(overlay))


def test_the_example_of_a_route_is_valid() -> None:
    route = yaml.safe_load((K8S / "examples" / "http-route.yaml").read_text(encoding="utf-8"))
    if _custom(route["apiVersion"], route["kind"]) is None:
        pytest.skip(f"no definition of HTTPRoute in {CRDS}")

    assert violations([route]) == []
    route["spec"]["rules"][0]["timeouts"]["backendRequests"] = "0s"
    assert len(violations([route])) == 1


Change = Callable[[Object], object]
MISTAKES: list[tuple[str, Change, str]] = [
    ("Namespace", lambda each: each["metadata"].update(label={}), "label"),
    ("ConfigMap", lambda each: each["data"].update(x=1), "is not of type 'string'"),
    ("NetworkPolicy", lambda each: each["spec"].update(egresses=[]), "egresses"),
    ("RayService", lambda each: each["spec"].update(upgradeStrategi={}), "upgradeStrategi"),
    (
        "RayService",
        lambda each: _containers(each)[0].update(imagePullPolicy=["Always"]),
        "is not of type 'string'",
    ),
    ("RayService", lambda each: _containers(each)[0].update(readinesProbe={}), "readinesProbe"),
    (
        "PrometheusRule",
        lambda each: each["spec"]["groups"][0].update(interval="soon"),
        "does not match",
    ),
    (
        "PrometheusRule",
        lambda each: each["spec"]["groups"][0]["rules"][0].pop("expr"),
        "'expr' is a required",
    ),
]


def _containers(service: Object) -> list[Object]:
    group = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    return list(group["template"]["spec"]["containers"])


@pytest.mark.parametrize(("kind", "change", "message"), MISTAKES)
def test_the_schemas_find_a_mistake(kind: str, change: Change, message: str) -> None:
    objects = objects_of("local-everything")
    change(of_kind(objects, kind)[0])

    assert any(re.search(re.escape(message), each) for each in violations(objects))
