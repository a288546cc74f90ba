"""OpenAPI description of what the gateway serves, derived from that of vLLM's application."""

import copy
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from deployments.replica.apar_extension import REFUSED_FIELDS, AparOptions
from deployments.wire.own_routes import OWN_OPERATIONS
from deployments.wire.routes import OPENAPI_PATH, ROUTES, ResponseForm, form_of

OFFERED: Mapping[str, tuple[str, ...]] = {
    **{path: (route.method,) for path, route in ROUTES.items() if path != OPENAPI_PATH},
    **{path: tuple(operations) for path, operations in OWN_OPERATIONS.items()},
}
"""Paths and methods described; a test compares them with what the gateway serves."""

_BYTES = ("/v1/embeddings", "/pooling")
"""Paths that answer with bytes if `encoding_format` says so."""

_SCHEMAS = "#/components/schemas/"
_EXTENDED = (
    "ChatCompletionRequest",
    "CompletionRequest",
    "ResponsesRequest",
    "AnthropicMessagesRequest",
)
_APAR = {
    "description": "Whether and how far this request may fork.",
    "anyOf": [AparOptions.model_json_schema(), {"type": "null"}],
}
_TEXT_OR_NONE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],  # `/health` adds the state of the models.
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NONE,
                "code": _TEXT_OR_NONE,
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "additionalProperties": False,
            "properties": {
                name: {"type": "string"} for name in ("type", "message", "param", "code")
            },
        },
    },
}
_ERRORS = {
    "400": "The request is invalid.",
    "401": "The API key is missing or unknown.",
    "403": "The API key may not use this.",
    "404": "The model or route does not exist.",
    "405": "The route does not accept this method.",
    "408": "The body did not arrive in time.",
    "409": "The request contradicts what exists.",
    "413": "The body is too large.",
    "415": "The coding of the body is not supported.",
    "421": "The request is for another host.",
    "422": "The request is well formed but cannot be served.",
    "426": "The request asks for WebSocket.",
    "429": "A limit of the API key is reached.",
    "501": "The model does not support this.",
    "503": "No replica can take the request now.",
}
_MAY_RETRY = ("429", "503")


def describe(document: Mapping[str, Any], routes: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Reduce vLLM's description to `routes` (path to methods), with our fields and error bodies.

    The gateway's own routes are added.
    """
    vllm_schemas = copy.deepcopy(dict(document["components"]["schemas"]))
    for name in vllm_schemas.keys() & set(_EXTENDED):
        properties = vllm_schemas[name]["properties"]
        for field in REFUSED_FIELDS:
            properties.pop(field, None)
        properties["apar"] = _APAR
    paths = {
        path: {
            method.lower(): _operation(path, document["paths"].get(path, {}), method)
            for method in methods
        }
        for path, methods in routes.items()
    }
    errors = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    schemas = _used(paths, vllm_schemas | errors)
    return {
        "openapi": document["openapi"],
        "info": {"title": "apar-serve", "version": version("apar-serve")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A server on the loopback interface may need no key.
        "security": [{}, {"key": []}],
    }


def _operation(path: str, item: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Describe one route, with vLLM's successful response and our errors."""
    own = OWN_OPERATIONS.get(path, {}).get(method)
    operation = copy.deepcopy(dict(own or item.get(method.lower(), {})))
    error = "AnthropicError" if form_of(path) is ResponseForm.MESSAGES else "Error"
    given = operation.get("responses", {})
    found = {status: given[status] for status in ("200", "201") if status in given}
    errors = {
        status: {
            "description": description,
            "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{error}"}}},
        }
        for status, description in _ERRORS.items()
    }
    for status in _MAY_RETRY:
        errors[status]["headers"] = {"Retry-After": {"schema": {"type": "string"}}}
    found = found or {"200": {"description": "Successful response."}}
    if path in _BYTES:
        found["200"].setdefault("content", {})["application/octet-stream"] = {}
    return operation | {"responses": found | errors}


def _used(part: Any, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas that a part of the document refers to, directly or indirectly."""
    used: dict[str, Any] = {}
    pending = [part]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            reference = value.get("$ref")
            if isinstance(reference, str):
                name = reference.removeprefix(_SCHEMAS)
                if name in schemas and name not in used:
                    used[name] = schemas[name]
                    pending.append(schemas[name])
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return used
