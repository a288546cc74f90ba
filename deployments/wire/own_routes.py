"""The routes that the gateway answers itself, as operations of its OpenAPI description."""

from collections.abc import Mapping
from typing import Any

from deployments.config.keys import KeyConfig

_TEXT = {"type": "string"}
_DAY = {"type": "string", "format": "date"}
_SOURCES = {"enum": ["configuration", "store"]}


def _key_schema(mode: str) -> dict[str, Any]:
    """Return the schema of a key's record; only one that a client sends may hold a hash."""
    schema = KeyConfig.model_json_schema()
    properties = dict(schema["properties"])
    if mode == "request":
        properties["hash"] = properties["hash"] | {"pattern": "^sha256:[0-9a-f]{64}$"}
    else:
        del properties["hash"]
        properties |= {"id": _TEXT, "created_at": _TEXT, "created_by": _TEXT, "source": _SOURCES}
    if mode == "created":
        properties["key"] = _TEXT | {"description": "The new key, unless its hash was sent."}
    return schema | {"properties": properties, "required": ["name"]}


def _parameter(place: str, name: str, schema: Mapping[str, Any] = _TEXT) -> dict[str, Any]:
    return {"in": place, "name": name, "required": place == "path", "schema": schema}


def _operation(
    summary: str,
    answer: Mapping[str, Any],
    *parameters: dict[str, Any],
    status: str = "200",
    body: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {
            status: {"description": summary, "content": {"application/json": {"schema": answer}}}
        },
    }
    if body is not None:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list_of(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_STATE = {"type": "object", "required": ["status"], "properties": {"status": _TEXT}}
_USAGE_ROW = {
    "type": "object",
    "required": ["day", "key", "model", "requests"],
    "properties": {"day": _DAY, "key": _TEXT, "model": _TEXT},
    "additionalProperties": {"type": "integer"},
}
_KEY = _key_schema("shown")
OWN_OPERATIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "/v1/models/{model}": {
        "GET": _operation(
            "A model, adapter or alias, as in the list.",
            {"type": "object", "required": ["id", "object"]},
            _parameter("path", "model"),
        )
    },
    "/live": {"GET": {"summary": "The gateway's process answers."}},
    "/ready": {"GET": {"summary": "The engine of at least one model answers."}},
    "/health": {"GET": _operation("Every model can serve.", _STATE)},
    "/health/{model}": {
        "GET": _operation("The model can serve.", _STATE, _parameter("path", "model"))
    },
    "/admin/keys": {
        "GET": _operation("All keys, without hashes.", _object(data=_list_of(_KEY))),
        "POST": _operation(
            "Creates a key.", _key_schema("created"), status="201", body=_key_schema("request")
        ),
    },
    "/admin/keys/{name}": {
        "DELETE": _operation(
            "Revokes the run-time keys of a name, or one of them.",
            _object(revoked=_list_of(_KEY), effective_within_s={"type": "number"}),
            _parameter("path", "name"),
            _parameter("query", "id"),
        )
    },
    "/admin/usage": {
        "GET": _operation(
            "Usage by day, key and model.",
            {
                "type": "object",
                "required": ["from", "to", "complete_within_s", "data"],
                "properties": {
                    "from": _DAY,
                    "to": _DAY,
                    "complete_within_s": {"type": "number"},
                    "data": _list_of(_USAGE_ROW),
                },
                "additionalProperties": False,
            },
            *(_parameter("query", name, _DAY) for name in ("from", "to")),
            *(_parameter("query", name) for name in ("key", "model")),
        )
    },
}
"""Operations by path and method; `deployments/replica/openapi.py` adds the errors."""
