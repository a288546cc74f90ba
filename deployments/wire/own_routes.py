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
_TIME = {"type": "integer", "description": "Unix time."}
_TIME_OR_NONE = {"type": ["integer", "null"], "description": "Unix time."}
_TEXT_OR_NONE = {"type": ["string", "null"]}
_FILE = _object(
    id=_TEXT,
    object={"const": "file"},
    bytes={"type": "integer"},
    created_at=_TIME,
    expires_at=_TIME,
    filename=_TEXT,
    purpose={"enum": ["batch", "batch_output"]},
    status={"const": "processed"},
)
_ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
_STATUSES = [
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
_METADATA = {"type": ["object", "null"], "additionalProperties": _TEXT}
_PROBLEM = _object(
    code=_TEXT, message=_TEXT, line={"type": ["integer", "null"]}, param=_TEXT_OR_NONE
)
_BATCH = _object(
    id=_TEXT,
    object={"const": "batch"},
    endpoint={"enum": _ENDPOINTS},
    errors={
        "anyOf": [_object(object={"const": "list"}, data=_list_of(_PROBLEM)), {"type": "null"}]
    },
    input_file_id=_TEXT,
    completion_window={"const": "24h"},
    status={"enum": _STATUSES},
    output_file_id=_TEXT_OR_NONE,
    error_file_id=_TEXT_OR_NONE,
    created_at=_TIME,
    expires_at=_TIME,
    **{f"{status}_at": _TIME_OR_NONE for status in _STATUSES[1:]},
    request_counts=_object(
        total={"type": "integer"}, completed={"type": "integer"}, failed={"type": "integer"}
    ),
    metadata=_METADATA,
)
_NEW_BATCH = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "additionalProperties": False,
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": _ENDPOINTS},
        "completion_window": {"const": "24h"},
        "metadata": _METADATA,
    },
}


def _page_of(items: Mapping[str, Any]) -> dict[str, Any]:
    return _object(
        object={"const": "list"},
        data=_list_of(items),
        first_id=_TEXT_OR_NONE,
        last_id=_TEXT_OR_NONE,
        has_more={"type": "boolean"},
    )


def _page_parameters(most: int) -> list[dict[str, Any]]:
    return [
        _parameter("query", "after"),
        _parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": most}),
        _parameter("query", "order", {"enum": ["asc", "desc"]}),
    ]


_UPLOAD = _operation("Uploads the input of a batch.", _FILE) | {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600},
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}
_CONTENT = {
    "summary": "The content of a file.",
    "parameters": [_parameter("path", "file_id")],
    "responses": {"200": {"description": "The file.", "content": {"application/octet-stream": {}}}},
}
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
    "/v1/files": {
        "GET": _operation(
            "The key's files.",
            _page_of(_FILE),
            *_page_parameters(10_000),
            _parameter("query", "purpose"),
        ),
        "POST": _UPLOAD,
    },
    "/v1/files/{file_id}": {
        "GET": _operation("A file.", _FILE, _parameter("path", "file_id")),
        "DELETE": _operation(
            "Deletes a file.",
            _object(id=_TEXT, object={"const": "file"}, deleted={"const": True}),
            _parameter("path", "file_id"),
        ),
    },
    "/v1/files/{file_id}/content": {"GET": _CONTENT},
    "/v1/batches": {
        "GET": _operation("The key's batches.", _page_of(_BATCH), *_page_parameters(100)),
        "POST": _operation("Creates a batch.", _BATCH, body=_NEW_BATCH),
    },
    "/v1/batches/{batch_id}": {
        "GET": _operation("A batch.", _BATCH, _parameter("path", "batch_id"))
    },
    "/v1/batches/{batch_id}/cancel": {
        "POST": _operation("Cancels a batch.", _BATCH, _parameter("path", "batch_id"))
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
