"""Validation of dashboards by Grafana's JSON schemas of dashboards, panels and queries."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, ValidationError

FOLDER = Path(__file__).resolve().parents[5] / "shared" / "grafana_schema"

needs_schemas = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"Grafana's schemas are not in {FOLDER}"
)


def violations(board: Mapping[str, Any]) -> list[str]:
    """All schema violations of a dashboard."""
    found = list(_against("dashboard", "Dashboard", board, "dashboard"))
    for panel in board["panels"]:
        if panel["type"] != "row":
            found += _in_panel(panel)
    return found


def _in_panel(panel: Mapping[str, Any]) -> Iterator[str]:
    kind, where = panel["type"], panel.get("title", "")
    if not (FOLDER / f"{kind}.jsonschema.json").is_file():
        yield f"{where}: no schema for a panel of type {kind}"
        return
    yield from _against(kind, "Options", panel["options"], f"{where}: options")
    field = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
    if "custom" in field["defaults"]:
        yield from _against(kind, "FieldConfig", field["defaults"]["custom"], f"{where}: custom")
    for override in field["overrides"]:
        for each in override["properties"]:
            yield from _in_property(kind, each["id"], each["value"], where)
    for target in panel["targets"]:
        yield from _against("prometheus", "Dataquery", target, f"{where}: target")


def _in_property(kind: str, name: str, value: object, where: str) -> Iterator[str]:
    """Violations in a property set by an override, which the dashboard's schema leaves open."""
    file, definition = ("dashboard", "FieldConfig")
    if name.startswith("custom."):
        file, definition = (kind, "FieldConfig")
    values = {name.removeprefix("custom."): value}
    for violation in _against(file, definition, values, f"{where}: override {name}"):
        # An override sets only one property.
        if not violation.endswith("is a required property"):
            yield violation


def _against(file: str, definition: str, value: object, where: str) -> Iterator[str]:
    for error in _validator(file, definition).iter_errors(value):
        for cause in _causes(error):
            path = ".".join(map(str, cause.absolute_path))
            yield f"{where}: {path}: {cause.message[:300]}"


@functools.cache
def _validator(file: str, definition: str) -> Draft7Validator:
    schema = _as_meant(json.loads((FOLDER / f"{file}.jsonschema.json").read_text()))
    rule = {"$ref": f"#/definitions/{definition}"}
    return Draft7Validator({"definitions": schema["definitions"], **rule})


def _as_meant(schema: Any) -> Any:
    """Work around two flaws of Grafana's schema generator.

    It writes "any value" as an object, although matchers and overrides accept strings there. Its
    `oneOf` alternatives overlap, so that a valid value matches more than one.
    """
    if isinstance(schema, list):
        return [_as_meant(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "object" and schema.get("additionalProperties") == {}:
        return {}
    return {"anyOf" if key == "oneOf" else key: _as_meant(value) for key, value in schema.items()}


def _causes(error: ValidationError) -> list[ValidationError]:
    """The errors of the alternative with the fewest errors, which was probably meant."""
    if not error.context:
        return [error]
    alternatives: dict[int, list[ValidationError]] = {}
    for cause in error.context:
        alternatives.setdefault(cause.schema_path[0], []).extend(_causes(cause))
    return min(alternatives.values(), key=len)
