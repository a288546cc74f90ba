"""The OpenAPI description of what the gateway serves, made from that of vLLM's application."""

import copy
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

PATH = "/openapi.json"
OFFERED = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/models": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
    "/health": "GET",
    "/live": "GET",
}
"""Path and method of what is described; a test compares it with what the gateway serves."""

# Of vLLM's request fields, those that are refused here; `apar_extension` says why.
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "prompt_embeds")
_SCHEMAS = "#/components/schemas/"
_EXTENDED = ("ChatCompletionRequest", "CompletionRequest")
_APAR = {
    "description": "Whether and how far this request may fork.",
    "anyOf": [
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "enabled": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "max_threads": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
                "replay": {
                    "description": "The token ids that each thread shall generate, by its path; "
                    "only where the server's configuration allows it.",
                    "anyOf": [
                        {
                            "type": "object",
                            "additionalProperties": {
                                "type": "array",
                                "items": {"type": "integer"},
                            },
                        },
                        {"type": "null"},
                    ],
                },
            },
        },
        {"type": "null"},
    ],
}
_TEXT_OR_NONE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
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
_ERRORS = {
    "400": "The request cannot be served as it is.",
    "401": "The API key is missing or unknown.",
    "403": "The API key may not use this.",
    "404": "The model or route does not exist.",
    "405": "The route does not accept this method.",
    "413": "The body is too large.",
    "422": "The request is well formed and cannot be served.",
    "429": "A limit of the API key is reached.",
    "501": "This cannot be done with this model.",
    "503": "No replica can take the request now.",
}
_MAY_RETRY = ("429", "503")


def described(document: Mapping[str, Any], routes: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's description, cut to `routes` (path to method), with our fields and error bodies."""
    vllm_schemas = copy.deepcopy(dict(document["components"]["schemas"]))
    for name in _EXTENDED:
        properties = vllm_schemas[name]["properties"]
        for field in REFUSED_FIELDS:
            properties.pop(field, None)
        properties["apar"] = _APAR
    paths = {
        path: {method.lower(): _operation(document["paths"].get(path, {}), method)}
        for path, method in routes.items()
    }
    schemas = {"Error": _ERROR} | _used(paths, vllm_schemas)
    return {
        "openapi": document["openapi"],
        "info": {"title": "apar-serve", "version": version("apar-serve")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A server may ask for a key; one on the loopback interface need not.
        "security": [{}, {"key": []}],
    }


def _operation(path: Mapping[str, Any], method: str) -> dict[str, Any]:
    """One route, with vLLM's successful response and our errors."""
    operation = copy.deepcopy(dict(path.get(method.lower(), {})))
    found = operation.get("responses", {}).get("200", {"description": "As it should be."})
    errors = {
        status: {
            "description": description,
            "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
        }
        for status, description in _ERRORS.items()
    }
    for status in _MAY_RETRY:
        errors[status]["headers"] = {"Retry-After": {"schema": {"type": "string"}}}
    return operation | {"responses": {"200": found} | errors}


def _used(part: Any, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas that a part of the document refers to, and those that these refer to."""
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
