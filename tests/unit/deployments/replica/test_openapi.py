"""The OpenAPI description of the gateway."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from deployments.gateway.health import HEALTH_PATH, LIVE_PATH, READY_PATH
from deployments.replica.openapi import OFFERED, describe
from deployments.wire.errors import ErrorResponse
from deployments.wire.routes import ONE_MODEL, OPENAPI_PATH
from deployments.wire.routes import ROUTES as ROUTES_SERVED


def schema(*references: str, **properties: Any) -> dict[str, Any]:
    for name in references:
        properties[name.lower()] = {"$ref": f"#/components/schemas/{name}"}
    return {"type": "object", "properties": properties}


DOCUMENT = {
    "openapi": "3.1.0",
    "paths": {
        "/v1/chat/completions": {
            "post": {
                "requestBody": {"$ref": "#/components/schemas/ChatCompletionRequest"},
                "responses": {
                    "200": {"description": "fine"},
                    "500": {"$ref": "#/components/schemas/VllmError"},
                },
            }
        },
        "/scale": {"post": {"$ref": "#/components/schemas/Scale"}},
    },
    "components": {
        "schemas": {
            "ChatCompletionRequest": schema("Tool", kv_transfer_params={}),
            "CompletionRequest": schema(),
            "Tool": schema("Tool", "Inner"),
            "Inner": schema(),
            "Scale": schema(),
            "VllmError": schema(),
        }
    },
}
ROUTES = {"/v1/chat/completions": ("POST",), "/live": ("GET",)}


def test_only_served_routes_and_what_they_refer_to_are_described() -> None:
    document = describe(DOCUMENT, ROUTES)

    assert set(document["paths"]) == set(ROUTES)
    assert set(document["components"]["schemas"]) == {
        "Error",
        "ChatCompletionRequest",
        "Tool",
        "Inner",
    }


def test_our_field_is_described_and_refused_ones_are_not() -> None:
    document = describe(DOCUMENT, ROUTES)

    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "kv_transfer_params" not in fields
    valid = Draft202012Validator(fields["apar"]).is_valid
    assert valid({"enabled": False, "max_threads": 2})
    assert not valid({"max_threads": 0})
    assert not valid({"threads": 1})
    assert valid({"replay": {"": [5, 2], "0.1": []}})
    assert valid({"replay": None})
    assert not valid({"replay": {"": ["5"]}})


def test_errors_have_our_schema_and_no_route_documents_a_500() -> None:
    document = describe(DOCUMENT, ROUTES)

    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert responses["200"] == {"description": "fine"}
    assert "500" not in responses
    error = Draft202012Validator(document["components"]["schemas"]["Error"])
    assert error.is_valid(json.loads(ErrorResponse(400, "no", param="model").body))
    assert not error.is_valid({"error": {"message": "no"}})


def test_vllms_own_description_is_not_modified() -> None:
    describe(DOCUMENT, ROUTES)

    fields: Any = DOCUMENT["components"]
    assert "kv_transfer_params" in fields["schemas"]["ChatCompletionRequest"]["properties"]


def test_every_route_of_the_gateway_is_described() -> None:
    own = {f"{ONE_MODEL}{{model}}", HEALTH_PATH, f"{HEALTH_PATH}/{{model}}", READY_PATH, LIVE_PATH}
    admin = {"/admin/keys", "/admin/keys/{name}", "/admin/usage"}
    files = {"/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"}
    batches = {"/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"}
    assert {*OFFERED, OPENAPI_PATH} == {*ROUTES_SERVED, *own, *admin, *files, *batches}
    described = describe(DOCUMENT, OFFERED)["paths"]
    for path, route in ROUTES_SERVED.items():
        assert path == OPENAPI_PATH or set(described[path]) == {route.method.lower()}
