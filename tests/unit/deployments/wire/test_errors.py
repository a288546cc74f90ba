import json
from typing import Any

import pytest

from apar_core.errors import AparError, CapacityError, EngineError, RequestError
from deployments.wire.errors import ErrorAnswer, answer_for, engine_lost, normalised


def error_in(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("wrong", param="n"), 400, "invalid_request_error", None),
        (CapacityError("full"), 503, "server_error", "overloaded"),
        (EngineError("dead"), 500, "server_error", "internal_error"),
        (AparError("other"), 500, "server_error", "internal_error"),
    ],
)
def test_each_of_our_errors_has_its_status(
    error: AparError, status: int, kind: str, code: str | None
) -> None:
    answer = answer_for(error)

    assert answer.status == status
    assert error_in(answer.body) == {
        "message": str(error),
        "type": kind,
        "param": getattr(error, "param", None),
        "code": code,
    }


def test_a_capacity_error_says_when_to_retry_in_whole_seconds() -> None:
    headers = dict(answer_for(CapacityError("full", retry_after_s=1.2)).headers)

    assert headers[b"retry-after"] == b"2"


def test_an_error_ends_a_stream_with_done() -> None:
    events = engine_lost().events.split(b"\n\n")

    assert error_in(events[0].removeprefix(b"data: "))["code"] == "engine_lost"
    assert events[1:] == [b"data: [DONE]", b""]


def test_content_length_is_that_of_the_body() -> None:
    answer = ErrorAnswer(404, "ä")

    assert dict(answer.headers)[b"content-length"] == str(len(answer.body)).encode()


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (
            {"error": {"message": "m", "type": "Bad Request", "param": "body.n", "code": 400}},
            "m",
            "n",
        ),
        ({"error": {"message": "m", "type": "X", "param": None, "code": 400}}, "m", None),
        ({"detail": "Not Found"}, "Not Found", None),
        ({"other": 1}, '{"other": 1}', None),
    ],
)
def test_vllms_error_bodies_become_openais(
    body: dict[str, Any], message: str, param: str | None
) -> None:
    error = error_in(normalised(400, json.dumps(body).encode()))

    assert error == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": None,
    }


@pytest.mark.parametrize("body", [b"", b"plain text", b"\xff", b"[]"])
def test_a_body_that_is_no_error_still_becomes_one(body: bytes) -> None:
    error = error_in(normalised(500, body))

    assert error["type"] == "server_error"
    assert error["message"]
