"""Objects against the schemas of Kubernetes and of the custom resources, strictly.

An API server drops fields that it does not know; here they are mistakes.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from k8s.objects import Object, label_of, pods

KUBERNETES = "1.33"
_FOLDER = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"
_EMBEDDED = "x-kubernetes-embedded-resource"
_OF_EVERY_OBJECT = ("apiVersion", "kind", "metadata")


class CustomSchemas:
    """Schemas of the custom resources whose definitions lie in a folder, as `GROUP_PLURAL.yaml`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._validators: dict[tuple[str, str], Draft202012Validator | None] = {}

    def __contains__(self, each: Object) -> bool:
        return self._validator(each["apiVersion"], each["kind"]) is not None

    def _validator(self, api_version: str, kind: str) -> Draft202012Validator | None:
        if (api_version, kind) not in self._validators:
            made = self._read(api_version, kind)
            self._validators[api_version, kind] = made
        return self._validators[api_version, kind]

    def _read(self, api_version: str, kind: str) -> Draft202012Validator | None:
        group, _, wanted = api_version.rpartition("/")
        file = self._folder / f"{group}_{kind.lower()}s.yaml"
        if not file.is_file():
            return None
        # The files are large, and the loader in C reads them ten times faster.
        spec = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            if version["name"] == wanted:
                schema = version["schema"]["openAPIV3Schema"]
                return Draft202012Validator(_strict(schema, is_root=True))
        return None

    def problems(self, each: Object) -> Iterator[str]:
        """What is wrong with a custom resource; one of its own, one of its metadata."""
        validator = self._validator(each["apiVersion"], each["kind"])
        assert validator is not None
        for error in sorted(
            validator.iter_errors(each), key=lambda error: list(map(str, error.path))
        ):
            yield f"{label_of(each)}: {_place(error.path)}: {error.message}"
        # The definitions leave metadata open; any object of Kubernetes' own has the same.
        yield from _kubernetes(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": each["metadata"]}, label_of(each)
        )


def problems(objects: list[Object], custom: CustomSchemas) -> Iterator[str]:
    """What is wrong with each object by its schema, pods of custom resources included."""
    for each in objects:
        if each in custom:
            yield from custom.problems(each)
        else:
            yield from _kubernetes(each, label_of(each))
    # Definitions of custom resources know the fields of a pod, and little of their values.
    for pod in pods(objects):
        metadata = {"name": "pod", "labels": pod.labels}
        as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}
        yield from _kubernetes(as_pod, pod.owner)


def _kubernetes(each: Object, label: str) -> Iterator[str]:
    try:
        validator = _kubernetes_validator(each["kind"], each["apiVersion"])
    except FileNotFoundError:
        yield f"{label}: Kubernetes {KUBERNETES} has no {each['kind']} of {each['apiVersion']}"
        return
    for error in sorted(validator.iter_errors(each), key=lambda error: list(map(str, error.path))):
        yield f"{label}: {_place(error.path)}: {error.message}"


@functools.cache
def _kubernetes_validator(kind: str, api_version: str) -> Draft202012Validator:
    """As in `kubernetes_validate.validate(..., strict=True)`, which reads its files every time."""
    group, _, version = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    schema = schema_contents(f"{_FOLDER}/{name}.json", KUBERNETES)
    definitions = schema_contents(f"{_FOLDER}/_definitions.json", KUBERNETES)
    registry: Registry[Any] = Registry()
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ registry)
    return Draft202012Validator(schema, registry=registry)


def _place(path: Any) -> str:
    return ".".join(str(part) for part in path) or "."


def _strict(schema: Object, *, is_root: bool = False) -> Object:
    """A custom resource's schema as JSON schema that refuses fields which it does not name."""
    if schema.get(_INT_OR_STRING):
        return {"type": ["integer", "string"]}
    made = {
        key: value
        for key, value in schema.items()
        if key in ("type", "enum", "pattern", "required", "minimum", "maximum", "minLength")
        or key in ("maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    }
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    if "items" in schema:
        made["items"] = _strict(schema["items"])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            made[key] = schema[key]
    if schema.get("type") == "object":
        made |= _strict_object(schema, is_root=is_root)
    return made


def _strict_object(schema: Object, *, is_root: bool) -> Object:
    properties: dict[str, Any] = {
        name: _strict(each) for name, each in schema.get("properties", {}).items()
    }
    if is_root or schema.get(_EMBEDDED):
        # Every object has these, whether the schema says so or not.
        properties |= dict.fromkeys(_OF_EVERY_OBJECT, True)
    rest = schema.get("additionalProperties", bool(schema.get(_PRESERVE)))
    if isinstance(rest, dict):
        rest = _strict(rest)
    return {"properties": properties, "additionalProperties": rest}
